"""A prepared directory, opened for a run."""

import logging
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evenpack.data.config import DataConfig
from evenpack.data.keys import derive_key, key_of_name
from evenpack.data.manifest import TOKENIZER_FOLDER, Manifest
from evenpack.data.order.config import PackingConfig
from evenpack.data.order.forms import Form, FormedStream
from evenpack.data.order.pack_stream import PackStream
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.stages import Stage, by_name, changes_by_name
from evenpack.data.order.step_shape import Batching
from evenpack.data.order.stored_plan import open_blocked_plan, open_plan
from evenpack.data.recipes import OF_THE_LOSS
from evenpack.data.sequences import MaskedPairsView, SentencePairsView, ViewOfDocuments, open_view
from evenpack.data.sequences.joined import JoinedView, single_views
from evenpack.data.sequences.pairs import ORIGIN_COLUMNS
from evenpack.data.sequences.shuffled import SHUFFLED, OrderedView, ShuffledView
from evenpack.data.sequences.view import StoredView
from evenpack.data.tokens.file import TokenFile, expect_random_reads
from evenpack.data.verification import Content, Verifier, require_verified
from evenpack.errors import DataError, NotPreparedError
from evenpack.files import expand_user, hash_of_json

if TYPE_CHECKING:
    from evenpack.data.tokenizers.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Split = Literal["train", "validation"]
Verification = Content | Literal["nothing", "later"]
"""What `PreparedData.open` verifies; `nothing` says so, `later` leaves it to the caller."""

_OTHER_FILES = 256
"""Open files of a process besides those of prepared data: libraries, sockets, logs."""
_MAPPINGS = 4
"""Times that a file may be mapped at once: by the views and plans of training, and by those of validation."""


class PreparedData:
    """The files of a prepared directory with the mixture of a run. Pickled, it is its path and the configuration."""

    def __init__(
        self, directory: Path, config: DataConfig, manifest: Manifest, *, repacking: PackingConfig | None = None
    ) -> None:
        """Takes files that `open` has checked."""
        self.directory = directory
        self.config = config
        self.manifest = manifest
        self.repacking = repacking
        """How plans pack the sequences; None: as prepared."""
        self.follows: Follows | None = None
        """What a run has read before, in packs of another form; None: nothing."""

    @classmethod
    def open(cls, directory: Path, config: DataConfig, *, verify: Verification = "all") -> "PreparedData":
        """Opens the output of `prepare`, whose sizes are checked.

        Args:
            verify: what is compared with its checksums first, once in a process, in time that grows with it unless
                `data.verify_in_training` is false. Without it the time does not grow with the corpus: for `nothing` a
                line of the log says that the content was not verified; for `later` the caller sees to it.

        Raises: NotPreparedError if the directory is not prepared, or incomplete; DataError if it was prepared from
        another data section, or if files are missing, cut short, damaged or unreadable.
        """
        directory = expand_user(directory).absolute()
        manifest = Manifest.read(directory).of_sources(config.sources)
        manifest.refuse_other_data(config, directory)
        absent = [name for name in config.sources if name not in manifest.sources]
        if absent:
            raise NotPreparedError(
                f"{directory} is prepared without source '{absent[0]}': run `evenpack prepare` with this run file, "
                "which adds it, and leaves the others as they are"
            )
        Verifier(directory, manifest).refuse_wrong_sizes()
        _allow_open_files(len(manifest.files))
        prepared = cls(directory, config, manifest)
        if verify != "later":
            prepared.verify(verify)
        return prepared

    def verify(self, content: Content | Literal["nothing"] = "all", *, share: tuple[int, int] = (0, 1)) -> None:
        """Compares files with their checksums, or says in the log that it does not: see `open`.

        Args:
            share: index and number of the processes that open the set together, each of which reads its part.

        Raises: DataError that names each damaged or unreadable file.
        """
        if content == "nothing" or not self.config.verify_in_training:
            _say_unverified(self.directory, "" if content == "nothing" else " (data.verify_in_training is false)")
        else:
            require_verified(self.directory, self.manifest, content, share=share)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.directory, self.config, self.repacking), {"follows": self.follows}

    def drawn_by(self, config: DataConfig) -> "PreparedData":
        """Returns the same data with the weights of a stage."""
        return self._with(config=config)

    def following(self, follows: "Follows | None") -> "PreparedData":
        """Returns the same data as a run goes on with it after packs of another form."""
        return self._with(follows=follows)

    def ordered(self, names: Sequence[str]) -> "PreparedData":
        """Returns the same data with the sources in this order."""
        sources = {name: self.config.sources[name] for name in names}
        return self.drawn_by(self.config.model_copy(update={"sources": sources}))

    def repacked(self, packing: PackingConfig) -> "PreparedData":
        """Returns the same sequences in other packs, for studies: packed again each time a plan is opened."""
        return self._with(repacking=packing)

    def _with(self, **changes: Any) -> "PreparedData":
        # `copy` would open the directory again, as a pickle does. What is cached depends on nothing that changes.
        found = PreparedData.__new__(PreparedData)
        vars(found).update(vars(self) | changes)
        return found

    @property
    def vocabulary_size(self) -> int:
        return self.manifest.tokenizer.vocabulary_size

    @property
    def end_of_text_id(self) -> int:
        return self.manifest.tokenizer.end_of_text_id

    @property
    def tokenizer_dir(self) -> Path:
        """The folder for `AutoTokenizer.from_pretrained`; absent if the source holds tokens and no text."""
        return self.directory / TOKENIZER_FOLDER

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the text. Raises: DataError if it is missing, as where the source holds tokens."""
        from evenpack.data.tokenizers.tokenizer import Tokenizer

        return Tokenizer.load(self.tokenizer_dir)

    @property
    def pack_length(self) -> int:
        """Slots of a pack."""
        return self.config.pack_length

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names in the mixture's order: that of their first appearance, and else of the run file."""
        return tuple(self.config.sources)

    @property
    def weights(self) -> tuple[int, ...]:
        """Weights of the sources, in the same order, from the first step on.

        They may change without a new preparation.
        """
        return tuple(source.weight for source in self.config.sources.values())

    def training_sources(self, *, seed: int, batching: Batching) -> tuple[PackedSource, ...]:
        """Returns views and plans of the training sequences, in the mixture's order."""
        sources = packed_sources(self, "train", seed=seed, batching=batching)
        if self.config.shuffle.kind == "permutation" and not self.config.keeps_order:
            # Grids alone have another view.
            views = [view for source in sources for view in single_views(source.view)]
            expect_random_reads([view.token_file for view in views if isinstance(view, StoredView)])
        return sources

    def token_file_prefix(self, source: str) -> Path:
        """Returns the prefix of the token file of a source's documents."""
        return self.directory / self.manifest.sources[source].token_file

    def source_folder(self, source: str) -> Path:
        """Returns the folder of a source's prepared files, except a token file that is used where it was."""
        return self.directory / "sources" / source

    def view(self, source: str, split: Split) -> ViewOfDocuments | SentencePairsView | ShuffledView:
        """Returns the sequences of a split, which may have none."""
        token_file = TokenFile(self.token_file_prefix(source), verify=False)
        view = open_view(self._folder(source, split), token_file, self.config.recipe)
        if split == "train" and self.config.shuffle.kind == "grid":
            assert isinstance(view, OrderedView), "the configuration takes no other recipes"
            return ShuffledView(view, TokenFile(self.source_folder(source) / SHUFFLED, verify=False))
        return view

    def stored_masks(self, source: str) -> int:
        """Returns the number of masks that are stored with the training pairs of a source."""
        view = self.view(source, "train")
        assert isinstance(view, MaskedPairsView), "prepared with masks"
        return len(view.mask_positions)

    def plan(self, source: str, split: Split, *, seed: int, batching: Batching = "packs") -> PackStream:
        """Opens the plan of the packs of a split.

        Packs for training are drawn by `seed`; those for validation are the same for every run, in an order in which
        the first few are a fair sample of all. In batches of sequences each sequence is a pack of one. Rows that keep
        their order (`DataConfig.keeps_order`) are taken in that order, whatever the seed. If training sequences are
        read block by block (`data.shuffle`), so are the packs.

        Raises: DataError if the split has no sequence.
        """
        record = getattr(self.manifest.sources[source], split)
        if record.packing is None:
            raise DataError(
                f"source '{source}' has no sequence for {split}: raise data.validation_fraction (now "
                f"{self.config.validation_fraction}) or give it more documents"
            )
        key = int(derive_key(seed if split == "train" else 0, key_of_name(f"{source}/{split}")))
        if split == "train" and self.config.shuffle.kind != "permutation":
            return open_blocked_plan(
                self._folder(source, split),
                key=key,
                shuffles_blocks=self.config.shuffle.kind == "grid",
                batching=batching,
                repacking=self.repacking,
            )
        return open_plan(
            self._folder(source, split),
            key=key,
            batching=batching,
            repacking=self.repacking,
            by_length=split == "train" and self.config.order == "by_length",
            keeps_order=self.config.keeps_order,
        )

    def fingerprint(self, seed: int, batching: Batching = "packs", *, stages: Sequence[Stage] = ()) -> str:
        """Returns a hash of everything that decides which packs form which step.

        Paths, times, world size and workers are not part of it.

        Args:
            stages: those that have begun; none: by the sources' weights, whatever the size of a step.
        """
        weights = [stage.weights for stage in stages] or [self.weights]
        drawn = [name for name, *of_stages in zip(self.source_names, *weights, strict=True) if any(of_stages)]
        recipe = self.config.recipe.model_dump(exclude_none=True)
        content = {
            "files": {
                name: checksum for source in (None, *drawn) for name, checksum in self.checksums.get(source, {}).items()
            },
            "tokenizer": self.manifest.tokenizer.model_dump(exclude={"inputs"}),
            # Here and below, options that are off are left out, so that a new one does not change all fingerprints.
            "recipe": {key: value for key, value in recipe.items() if not (key in OF_THE_LOSS and value == "all")},
            "pack_length": self.pack_length,
            "mixture": by_name(self.source_names, self.weights),
            "seed": seed,
        }
        if batching != "packs":
            content["batching"] = batching
        if self.config.order != "shuffled":
            content["order"] = self.config.order
        if changes := changes_by_name(self.source_names, stages):
            # A change of weights alone is written as it was before there were stages.
            content["mixture_schedule"] = changes
        if self.repacking is not None:
            content["repacking"] = self.repacking.model_dump()
        return hash_of_json(content)

    @cached_property
    def checksums(self) -> dict[str | None, dict[str, str]]:
        """The checksums of the files of each source, by their names; None: of those of no single source."""
        found: dict[str | None, dict[str, str]] = {}
        for name, record in self.manifest.files.items():
            if Path(name).stem not in ORIGIN_COLUMNS:
                source = name.split("/")[1] if name.startswith("sources/") else None
                found.setdefault(source, {})[name] = record.content.whole
        return found

    def _folder(self, source: str, split: Split) -> Path:
        return self.source_folder(source) / split


@cache
def _say_unverified(directory: Path, reason: str) -> None:
    """Says it once in a process: studies open a set for each of their runs."""
    log.info(
        "the content of %s is not verified here, only its sizes%s; `evenpack verify` compares all of it",
        directory,
        reason,
    )


def _reopen(directory: Path, config: DataConfig, repacking: PackingConfig | None) -> PreparedData:
    prepared = PreparedData.open(directory, config, verify="later")  # by whoever opened what was pickled
    return prepared if repacking is None else prepared.repacked(repacking)


def _allow_open_files(files: int) -> None:
    """Raises this process's soft limit of open files to the hard one if it may be too low: each mapped file is open."""
    import resource  # which Windows lacks

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OTHER_FILES + _MAPPINGS * files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def packed_sources(
    prepared: PreparedData, split: Split, *, seed: int, only: str | None = None, batching: Batching = "packs"
) -> tuple[PackedSource, ...]:
    """Returns views and plans of one split, in the mixture's order."""
    names = prepared.source_names if only is None else (only,)
    found = tuple(
        PackedSource(
            view=prepared.view(name, split),
            plan=prepared.plan(name, split, seed=seed, batching=batching),
            key=key_of_name(name),
        )
        for name in names
    )
    if split != "train" or prepared.follows is None:
        return found
    earlier, forms = prepared.follows
    before = packed_sources(earlier, split, seed=seed, only=only, batching=batching)
    return tuple(
        PackedSource(
            view=JoinedView(one.view, source.view),
            plan=FormedStream(one.plan, source.plan, forms[name], first_sequence=one.view.count),
            key=source.key,
        )
        for name, one, source in zip(names, before, found, strict=True)
    )


Follows = tuple[PreparedData, Mapping[str, Form]]
"""The data in the form before, and the place of each source's packs in its stream, by name."""
