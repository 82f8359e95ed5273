"""Defines a grid of arms: each recipe at each length, with each atom."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.data.config import check_atom
from evenpack.studies.runs.config import Name, Settings
from evenpack.units import Rows, Tokens

_KEYS = ("data.recipe.max_sequence_length", "data.recipe.atom", "data.pack_length", "training.packs_per_step")
"""Keys that a grid sets in each of its arms."""


class GridLength(Section):
    """The arms of one maximum sequence length (MSL)."""

    max_sequence_length: Tokens = Field(ge=2)
    """Tokens of a row."""
    rows_per_step: Rows = Field(ge=1)
    """Rows of one optimizer update."""
    atoms: list[Annotated[Tokens, Field(ge=1)]] = Field(min_length=1)
    """Sizes of atoms, which are shuffled as units, in tokens; each divides the MSL, or is a multiple of it."""
    settings: Settings = Field(default_factory=dict)
    """Settings of all arms of this length: dotted keys with their values."""

    @model_validator(mode="after")
    def _check_atoms(self) -> "GridLength":
        for atom in self.atoms:
            check_atom(atom, self.max_sequence_length, smallest=1)
        if len(set(self.atoms)) < len(self.atoms):
            listed = ", ".join(map(str, self.atoms))
            raise ValueError(f"atoms: two runs would have the same name: give each atom once, found {listed}")
        return self


class GridSection(Section):
    """A grid that generates arms for each length, recipe and atom."""

    lengths: list[GridLength] = Field(min_length=1)
    """Lengths of rows, each with its atoms."""
    recipes: dict[Name, Settings] = Field(default_factory=dict)
    """Recipes by name, each with its dotted keys and values; they are run with each atom, as arms named
    RECIPE_MSL_atom_ATOM."""
    recipes_without_atoms: dict[Name, Settings] = Field(default_factory=dict)
    """Recipes without atoms, run once for each length, as arms named RECIPE_MSL."""

    @model_validator(mode="after")
    def _check_lengths(self) -> "GridSection":
        lengths = [row.max_sequence_length for row in self.lengths]
        if len(set(lengths)) < len(lengths):
            listed = ", ".join(map(str, lengths))
            raise ValueError(
                f"lengths: two runs would have the same name: give each max_sequence_length once, found {listed}"
            )
        for name, settings in {**self.recipes, **self.recipes_without_atoms}.items():
            inner = settings.get("data.recipe")
            for key in [*settings, *(f"data.recipe.{key}" for key in (inner if isinstance(inner, dict) else ()))]:
                if key in _KEYS:
                    raise ValueError(f"{name}: {key} is set by the grid itself, from lengths: leave it out")
        return self

    @property
    def arms(self) -> "list[GridArm]":
        """The arms, ordered by length, recipe and atom."""
        return list(self._arms())

    def _arms(self) -> "Iterator[GridArm]":
        for row in self.lengths:
            for recipe, settings in self.recipes.items():
                for atom in row.atoms:
                    yield _arm(row, recipe, settings, atom)
            for recipe, settings in self.recipes_without_atoms.items():
                yield _arm(row, recipe, settings, None)


@dataclass(frozen=True, kw_only=True)
class GridArm:
    """An arm that a grid expands to."""

    name: str
    recipe: str
    """Name of the recipe in the grid."""
    settings: Settings


def _arm(row: GridLength, recipe: str, settings: Settings, atom: int | None) -> GridArm:
    length = row.max_sequence_length
    of_atom = {} if atom is None else {"data.recipe.atom": atom}
    return GridArm(
        name=f"{recipe}_{length}" if atom is None else f"{recipe}_{length}_atom_{atom}",
        recipe=recipe,
        settings={
            **settings,  # whole recipes come first, followed by the grid's changes to them
            "data.recipe.max_sequence_length": length,
            **of_atom,
            "data.pack_length": length,
            "training.packs_per_step": row.rows_per_step,
            **row.settings,
        },
    )
