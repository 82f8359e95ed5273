"""Reading a run file: YAML becomes one frozen, checked object; every error message names the nearest valid word."""

import difflib
import logging
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from evenpack.errors import ConfigError
from evenpack.files import expand_user, expand_users
from evenpack.shipped import shipped_run_files
from evenpack.yaml_text import cut, quoted, read_yaml

log = logging.getLogger(__name__)

_USUAL_NAMES = {
    "lr max_lr peak_lr learning_rate": "optimizer.learning_rate training.learning_rate",
    "min_lr lr_min min_lr_ratio": "schedule.final_fraction",
    "lr_schedule lr_scheduler lr_scheduler_type scheduler": "schedule.kind",
    "warmup warmup_steps num_warmup_steps": "schedule.warmup_steps training.warmup_fraction",
    "num_decay_steps lr_wsd_decay_iters": "schedule.decay_steps",
    "warmup_ratio warmup_fraction": "schedule.warmup_steps training.warmup_fraction",
    "betas adam_betas": "optimizer.beta1 optimizer.beta2",
    "eps adam_epsilon": "optimizer.epsilon",
    "wd weight_decay": "optimizer.weight_decay training.weight_decay",
    "batch batch_size": "training.packs_per_step training.packs_per_micro_batch",
    "grad_accum gradient_accumulation gradient_accumulation_steps": "training.packs_per_step "
    "training.packs_per_micro_batch",
    "global_batch_size train_batch_size": "training.packs_per_step",
    "micro_batch micro_batch_size device_batch_size per_device_train_batch_size "
    "train_micro_batch_size_per_gpu": "training.packs_per_micro_batch",
    "iterations max_iters max_steps num_steps num_train_steps step total_steps train_iters "
    "train_steps": "training.steps",
    "max_epochs num_epochs num_train_epochs": "training.epochs",
    "max_tokens train_tokens": "training.tokens",
    "block_size context_length context_size max_length max_seq_len max_seq_length seq_len seq_length "
    "sequence_length": "data.recipe.max_sequence_length data.max_sequence_length data.pack_length",
    "vocab_size vocabulary_size": "data.tokenizer.vocabulary_size",
    "n_layer n_layers num_layers num_hidden_layers": "model.layers",
    "n_head n_heads num_heads num_attention_heads": "model.heads",
    "dim d_model hidden_dim n_embd": "model.hidden_size",
    "n_ctx n_positions max_position_embeddings": "model.max_positions",
    "gradient_checkpointing recompute": "model.activation_checkpointing",
    "clip_grad grad_clip max_grad_norm max_norm": "training.gradient_clipping",
    "bf16 dtype fp16 fp32 mixed_precision": "training.precision",
    "fp32_residual_connection residual_in_fp32": "training.residual_dtype",
    "eval_every eval_interval eval_steps": "training.evaluate_every_steps",
    "checkpoint_interval save_every save_interval save_steps": "training.checkpoint_every_steps",
    "dataloader_num_workers num_workers": "training.loader_workers",
    "init_from load_checkpoint pretrained": "training.initialize_from",
    "stage zero zero_optimization": "deepspeed.zero_stage",
    "deepspeed_config ds_config": "deepspeed.extra deepspeed.zero_stage",
    "dataset_path data_path train_data train_file train_files": "data.sources",
    "eval_data validation_data validation_file": "data.sources.NAME.validation_path data.validation_fraction",
    "tokenizer_name tokenizer_path": "data.tokenizer.path data.tokenizer.name",
    "attention_backend attn attn_impl attn_implementation fa4 flash4 flash_attention "
    "flash_attention_4 use_flash_attn": "attention.backend",
    "epochs_max n_epochs train_epochs": "training.epochs",
    "save_total_limit": "training.keep_checkpoints",
    "logging_dir out_dir save_dir": "run.output_dir",
    "mixture_schedule phases": "stages",
    "wandb wandb_project": "metrics.wandb.project",
}
"""Names that other programs give to keys, or that keys have in another section, with the keys; only for messages."""

_MOST_LINES = 20
"""Lines of errors in a message."""

_LINE_CHARACTERS = 118
"""Characters of a line of known words."""

_MOST_NEAR = 6
"""Known words that are shown where all of them would take more than two lines; keys that are shown for one name."""


class Section(BaseModel):
    """Base of every section of a run file: frozen, no unknown keys, numbers finite."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_true_as_number(cls, values: Any) -> Any:
        """Refuses what Pydantic takes for 1 or 0."""
        for key, value in values.items() if isinstance(values, dict) else ():
            found = _first_bool(value)
            if found is not None and key in cls.model_fields and _takes_numbers(cls.model_fields[key].annotation):
                raise ValueError(f"{key} takes numbers, found {str(found).lower()}")
        return values


def _takes_numbers(annotation: Any) -> bool:
    """Returns whether a field may be an integer or float and may not be true or false."""
    kinds = _plain_types(annotation)
    return (int in kinds or float in kinds) and bool not in kinds


def _plain_types(annotation: Any) -> set[Any]:
    """Returns the types at all depths of a field, except the types within its sections."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Annotated:
        arguments = arguments[:1]
    elif typing.get_origin(annotation) is typing.Literal:
        arguments = tuple(map(type, arguments))
    return set().union(*map(_plain_types, arguments)) if arguments else {annotation}


def _first_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((part for part in parts if isinstance(part, bool)), None)


SectionT = TypeVar("SectionT", bound=Section)


def _expand_user(value: Any) -> Any:
    if not isinstance(value, str | Path):
        return value
    if not str(value).strip() or "\0" in str(value):
        raise ValueError(f"expected a path, found {quoted(str(value))}; the current directory is '.'")
    expanded = expand_users(value)
    if str(expanded).startswith("~"):
        raise ValueError(f"{value}: expected '~' or the name of a user after it, found no such user")
    return expanded


UserPath = Annotated[Path, BeforeValidator(_expand_user)]
"""A path of a run file. `~` is expanded here, so that all readers of a key use the same path."""

UserName = Annotated[str, BeforeValidator(expand_users)]
"""A name on the hub, or a folder, whose `~` is expanded."""


def _expand_users(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        value = [value]
    elif not value:
        raise ValueError("expected a path or a list of paths, found an empty list")
    for path in value:
        if not isinstance(path, str | Path):
            raise ValueError(f"expected a path or a list of paths, found {quoted(path)}")
    paths = [str(_expand_user(path)) for path in value]
    return paths[0] if len(paths) == 1 else paths


UserPaths = Annotated[Path | tuple[Path, ...], BeforeValidator(_expand_users)]
"""A path of a run file, or several: a list with one path equals that path, so that both give the same section."""


@dataclass(frozen=True, kw_only=True)
class SectionByKind:
    """Annotation of a section whose schema is looked up by its `kind`, where the kinds are not known beforehand."""

    find: Callable[[str], type[Section]]
    """Function that returns the schema of a kind. Raises: ConfigError if there is none."""
    known: Callable[[], Sequence[str]]
    """Function that returns all kinds."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"oneOf": [handler(self.find(kind).__pydantic_core_schema__) for kind in self.known()]}

    def schema_of(self, section: Any) -> type[Section]:
        """Returns the schema of the section's kind. Raises: ConfigError if it names no known kind."""
        kind = section.get("kind") if isinstance(section, dict) else None
        return self.find("" if kind is None else str(kind))

    def _check(self, value: Any, check_base: Callable[[Any], Any]) -> Any:
        """Checks the section; errors of its schema are reported at its position. A section object is not changed."""
        if not isinstance(value, dict):
            return check_base(value)
        try:
            schema = self.schema_of(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return schema.model_validate(value)


def load_run_file(path: Path, schema: type[SectionT], overrides: Sequence[str] = ()) -> SectionT:
    """Reads a run file, applies `section.key=value` overrides and checks everything.

    Args:
        path: the path of a file, or the name of one that comes with evenpack; see `find_run_file`.

    Raises: ConfigError with the position, what was expected and what was found.
    """
    try:
        path = find_run_file(path)
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from error
    except OSError as error:
        raise ConfigError(f"run file {quoted(str(path))} cannot be read: {error.strerror}") from error
    values = read_yaml(text, f"{path} is not readable YAML")
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections such as 'run:' and 'data:', found {type(values).__name__}")
    return validate(overridden(values, schema, overrides, origin=str(path)), schema, origin=str(path))


def overridden(
    written: dict[str, Any], schema: type[Section], overrides: Sequence[str], *, origin: str
) -> dict[str, Any]:
    """Returns the values of a run file with `section.key=value` overrides. Raises: ConfigError for a wrong one."""
    values = deepcopy(written)
    given = tuple(_apply_override(values, override, schema, overrides[at:]) for at, override in enumerate(overrides))
    for place in dict.fromkeys(name.removesuffix(".kind") for name in given if name.endswith(".kind")):
        dropped = _drop_keys_of_old_kind(values, written, place, given, schema)
        if dropped:
            _say_once(f"{origin}: {dropped}")
    return values


def find_run_file(path: Path) -> Path:
    """Returns `path` if it is a file, otherwise the run file of this name that comes with evenpack.

    Raises: ConfigError with the nearest names if there is neither.
    """
    path = expand_user(path)
    shipped, name = shipped_run_files(), path.as_posix().removesuffix(".yaml")
    try:
        is_file, exists = path.is_file(), path.exists()
    except OSError as error:
        raise ConfigError(f"run file {quoted(str(path))} cannot be read: {error.strerror}") from error
    if is_file:
        return path
    if name in shipped:
        return shipped[name]
    if exists:
        raise ConfigError(f"run file {path} is not a file")
    endings = {known.rpartition("/")[2]: known for known in shipped}
    endings |= {file.stem: str(file) for file in sorted(path.parent.glob("*.y*ml"))} if path.name else {}
    near = difflib.get_close_matches(path.stem, endings, n=3)
    hint = f"did you mean {', '.join(endings[ending] for ending in near)}? " if near else ""
    raise ConfigError(
        f"run file {cut(str(path))} does not exist, and none of this name comes with evenpack; {hint}"
        "`evenpack config list` shows those that do"
    )


def validate(values: dict[str, Any], schema: type[SectionT], *, origin: str) -> SectionT:
    """Checks `values` against `schema`; `origin` opens the error message."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        lines = [_explain(detail, schema, values) for detail in error.errors(include_url=False)]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more"]
        raise ConfigError("\n".join([f"{origin}:", *(f"  {line}" for line in lines)])) from error


def with_defaults(values: Mapping[str, Any], schema: type[Section]) -> Mapping[str, Any]:
    """Returns a recorded run file with the defaults of newer keys; unchanged if this version cannot read it."""
    try:
        return schema.model_validate(values).model_dump(mode="json")
    except ValidationError:
        return values


def with_values(config: SectionT, sections: Mapping[str, Any], *, origin: str) -> SectionT:
    """Returns the run file with some values changed, section by section; a section that was null is made of them.

    A list of sections is replaced as a whole.

    Raises: ConfigError, which `origin` opens, if it is invalid then.
    """
    values = config.model_dump()
    changed = {
        name: {**(values[name] or {}), **section} if isinstance(section, Mapping) else section
        for name, section in sections.items()
    }
    return validate(values | changed, type(config), origin=origin)


def nearest(word: str, known: Sequence[str]) -> str:
    """Returns a hint for an unknown word: the nearest known one, and the whole list, or of a long one the nearest."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    names = f" {', '.join(sorted(known))}"
    if len(names) > 2 * _LINE_CHARACTERS:
        near = difflib.get_close_matches(word, known, n=_MOST_NEAR, cutoff=0.0)
        names = f" {', '.join(near)} and {len(known) - len(near)} more"
    if len(names) > _LINE_CHARACTERS:
        names = "\n" + textwrap.fill(names.strip(), _LINE_CHARACTERS, initial_indent="  ", subsequent_indent="  ")
    return f"{hint}known:{names}"


def usual_keys(name: str) -> tuple[str, ...]:
    """Returns the keys, of run files or others, that are usually called `name`; none for an unknown name."""
    asked = name.lower().replace("-", "_")
    return next((tuple(keys.split()) for names, keys in _USUAL_NAMES.items() if asked in names.split()), ())


def _nearest_key(place: str, known: Sequence[str], schema: type[Section], *, value: str = "") -> str:
    """Returns a hint for an unknown key: those that are usually called so, or so called elsewhere, or `nearest`.

    Args:
        place: dotted path of the key.
        value: follows a key of the same name, for example `=60`.
    """
    name = place.rpartition(".")[2]
    usual = [key for key in usual_keys(name) if _has_key([schema], key.split("."))]  # their units may be others
    same = [key for key in dict.fromkeys(_places_of(name, [schema], "")) if not _is_place(place, key)]
    keys = usual or [f"{key}{value}" for key in same]
    return f"did you mean {', or '.join(keys)}?" if 0 < len(keys) <= _MOST_NEAR else nearest(name, known)


def _places_of(name: str, kinds: Sequence[Any], place: str) -> Iterator[str]:
    """Yields the dotted paths of all keys that have this name, with NAME where the user chooses one."""
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Section):
            for key, field in kind.model_fields.items():
                if key == name:
                    yield f"{place}{key}"
                by_kind = [mark for mark in field.metadata if isinstance(mark, SectionByKind)]
                below = [mark.find(known) for mark in by_kind for known in mark.known()] or _open_union(
                    field.annotation
                )
                yield from _places_of(name, below, f"{place}{key}.")
        elif typing.get_origin(kind) is dict:
            yield from _places_of(name, _open_union(typing.get_args(kind)[1]), f"{place}NAME.")


def _is_place(asked: str, place: str) -> bool:
    """Returns whether a path is one of `place`, in which NAME stands for any name."""
    return re.fullmatch(re.escape(place).replace("NAME", "[^.]+"), asked) is not None


def _has_key(kinds: list[Any], parts: Sequence[str]) -> bool:
    """Returns whether a dotted path leads to a key of the schemas; the keys below a `SectionByKind` are not known."""
    known = _known_keys(kinds, {})
    return (
        not parts or not kinds or (parts[0] in (known or ()) and _has_key(_children(kinds, parts[0], None), parts[1:]))
    )


def _apply_override(values: dict[str, Any], override: str, schema: type[Section], words: Sequence[str]) -> str:
    """Sets one `a.b.c=value` and returns `a.b.c`; the key must exist in the schema, a source in the file.

    Args:
        words: the override with all that follow, of which its value may be one that was written apart.
    """
    override = str(override)  # which a library's user may have given as anything
    name, separator, text = override.partition("=")
    is_apart = not text and len(words) > 1 and ("=" not in words[1] or words[1].startswith("="))
    if not separator or not name or is_apart:
        joined = re.match(r"(-*)([^\s=:]+):?[\s=]+([^\s=]+)", " ".join(map(str, words)))
        hint = f"; did you mean {cut(f'{joined[2]}={joined[3]}')}, without a space?" if is_apart and joined else ""
        raise ConfigError(f"override {quoted(override)} is not of the form section.key=value{hint}")
    origin = f"override {quoted(override)}"
    value = read_yaml(text, f"{origin}: the value is not readable YAML") if text else None
    *parents, last = name.split(".")
    place: Any = values
    kinds: list[Any] = [schema]
    for depth, key in enumerate([*parents, last]):
        known = _known_keys(kinds, place)
        if known is not None and key not in known:
            where = ".".join(name.split(".")[:depth]) or "the run file"
            at = ".".join(name.split(".")[: depth + 1])
            hint = _nearest_key(at, known, schema, value=f"={cut(text)}" if depth == len(parents) else "")
            raise ConfigError(f"{origin}: '{cut(where)}' has no key {quoted(key)}; {hint}")
        if depth == len(parents):
            place[key] = value
            return name
        kinds = _children(kinds, key, None)  # a later override may name another kind: checked when all are in
        if place.get(key) is None:
            place[key] = {}
        elif any(_tag(kind) == place[key] for kind in kinds):  # a section may be written as its kind alone
            place[key] = {"kind": place[key]}
        place = place[key]
        if not isinstance(place, dict):
            raise ConfigError(f"{origin}: '{cut('.'.join(parents[: depth + 1]))}' is a single value, not a section")
    raise AssertionError("a name has a last part")


def _drop_keys_of_old_kind(
    values: dict[str, Any], written: dict[str, Any], place: str, given: Sequence[str], schema: type[Section]
) -> str:
    """Drops keys of the file from a section whose `kind` an override has changed, and returns a note of them, or "".

    Only keys that the file's kind has and the new one does not: a misspelt key stays an error, and so does an override.
    """
    *parents, last = place.split(".")
    kinds: list[Any] = [schema]
    for key in parents:
        kinds, values, written = (
            _children(kinds, key, values.get(key)),
            _section_in(values, key),
            _section_in(written, key),
        )
    section, before = _section_in(values, last), _section_in(written, last)
    old, new = (_fields_of_kind(kinds, last, found.get("kind")) for found in (before, section))
    dropped = [
        key for key in before if key in old - new and not any(_overlap(name, f"{place}.{key}") for name in given)
    ]
    if not new or not dropped:
        return ""
    shown_keys = ", ".join(f"{key}: {quoted(section.pop(key))}" for key in dropped)
    return f"{place}.kind is {section['kind']} by an override; left out what that kind does not have: {shown_keys}"


def _overlap(one: str, other: str) -> bool:
    """Returns whether two dotted paths are equal, or one of them leads into the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _section_in(section: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns the section under `key`, or an empty one; one that is written as its kind alone has no keys to drop."""
    found = section.get(key)
    return found if isinstance(found, dict) else {}


def _fields_of_kind(kinds: list[Any], key: str, kind: Any) -> set[str]:
    """Returns the keys that a section under `key` has if it is of the given kind; none if there is no such kind.

    A section without a kind is of the default one.
    """
    try:
        sections = [found for found in _children(kinds, key, {"kind": kind}) if _tag(found) is not None]
    except ConfigError:
        return set()
    chosen = [found for found in sections if kind in (_tag(found), None)]
    return {name for found in chosen for name in found.model_fields}


@cache
def _say_once(message: str) -> None:
    """Logs a message once in this process; a study reads a run file for each of its runs."""
    log.info(message)


def _known_keys(kinds: list[Any], place: dict[str, Any]) -> list[str] | None:
    """Returns the keys allowed here: a section's fields, a named mapping's present names, or None for any."""
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    if sections:
        return sorted({name for section in sections for name in section.model_fields})
    if any(typing.get_origin(kind) is dict and typing.get_args(kind)[1] is not Any for kind in kinds):
        return list(place)
    return None


def _children(kinds: list[Any], key: str, values: Any) -> list[Any]:
    """Returns the types that are possible under `key`, with unions and annotations opened.

    Args:
        values: the present values, by which a `SectionByKind` is found; None where they may still change.
    """
    found: list[Any] = []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Section):
            if key in kind.model_fields:
                found += _types_of(kind.model_fields[key], values)
        elif typing.get_origin(kind) is dict:
            found += _open_union(typing.get_args(kind)[1])
    return found


def _types_of(field: FieldInfo, values: Any) -> list[Any]:
    by_kind = [mark for mark in field.metadata if isinstance(mark, SectionByKind)]
    if not by_kind:
        return _open_union(field.annotation)
    return [] if values is None else [mark.schema_of(values) for mark in by_kind]


def _open_union(kind: Any) -> list[Any]:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _open_union(typing.get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        return [part for choice in typing.get_args(kind) for part in _open_union(choice)]
    return [kind]


def _explain(detail: Any, schema: type[Section], values: dict[str, Any]) -> str:
    """Returns one pydantic error as: position, what was expected, what was found."""
    location = [str(part) for part in detail["loc"]]
    kinds: list[Any] = [schema]
    place: list[str] = []
    found: Any = values
    for part in location[:-1]:
        found = found.get(part) if isinstance(found, dict) else None
        children = _children(kinds, part, found)
        if children:  # discriminator tags of unions have no children: they are not keys of the file
            kinds = children
            place.append(part)
    last = location[-1] if location else ""
    name = cut(".".join([*place, last]))
    if detail["type"] == "extra_forbidden":
        chosen = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        tags = set(location)
        tagged = [kind for kind in chosen if _tag(kind) in tags]
        known = sorted({field for kind in tagged or chosen for field in kind.model_fields})
        return f"{name}: no such key; {_nearest_key('.'.join([*place, last]), known, schema)}"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{name}: this key is required"
    if detail["type"] == "value_error":
        return f"{name}: {message}" if name else message
    remedy = "; read a folder of save_to_disk as kind: hub with name: FOLDER" if "tag 'arrow'" in message else ""
    if isinstance(detail["input"], bool | int | float) and detail["type"] in ("string_type", "literal_error"):
        read = "yes, no, on and off as true or false" if isinstance(detail["input"], bool) else "this as a number"
        remedy = f"; YAML reads {read}: write text in quotes"
    return f"{name}: {message}, found {quoted(detail['input'])}{remedy}"


def _tag(kind: Any) -> str | None:
    """Returns the discriminating value of the `kind` field, if this is a section that has one."""
    field = kind.model_fields.get("kind") if isinstance(kind, type) and issubclass(kind, Section) else None
    choices = typing.get_args(field.annotation) if field is not None else ()
    return str(choices[0]) if len(choices) == 1 else None
