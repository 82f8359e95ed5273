# %% [markdown]
# # Choosing a packing algorithm and the number of sequences per pack
# A notebook in cells, for Jupyter (by jupytext), VS Code or plain Python. It does what `evenpack study packing
# wikipedia_512 --depths 1,2,3,none` does: Wikipedia's lengths at 512 tokens come with evenpack, and any other list of
# lengths can be used instead.

# %%
import evenpack

depths, algorithms = "1,2,3,none", "longest_pack_first,cutting_stock"
report = evenpack.study("packing", "wikipedia_512", depths=depths, algorithms=algorithms)
report.show()

# %% [markdown]
# The rows of the table are values: find the least number of sequences per pack with less than 1 % padding.

# %%
full = [row for row in report.value["packings"] if row.efficiency > 0.99]
best = min(full, key=lambda row: row.depth)
print(f"{best.algorithm}, {best.depth} sequences a pack: {best.efficiency:.2%} full, {best.speed_up:.2f} x padding")
