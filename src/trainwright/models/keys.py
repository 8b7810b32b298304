"""Reading a configuration: whole numbers, flags and words of a ``config.json``, checked, with a family's own defaults.

A key that a configuration leaves out takes the value that the family's configuration class in ``transformers`` gives it (``DEFAULTS`` of
the family's file); every such number is kept in `Keys.assumed`, so that nothing is assumed silently. A key that is misspelled is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SpecError, nearest

MISSING = object()
UNBOUNDED = 2**27  # tokens: positions of a model whose configuration sets no limit
MOST_HIDDEN, MOST_LAYERS, MOST_HEADS, MOST_EXPERTS, MOST_VOCAB = 2**20, 10_000, 2**14, 2**16, 2**26
ALWAYS_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
TYPO = 0.92  # similarity from which a key that nobody reads is taken for a misspelled one

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


class Keys:
    """The keys of one configuration. Reading is by name, first name that is there wins; ``null`` counts as left out.

    Every reader raises `SpecError` with the key's name for a value of the wrong kind or outside its range.
    """

    def __init__(self, config: Mapping[str, Any], name: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self.config, self.name, self.defaults = config, name or "model", defaults or {}
        self.assumed: dict[str, Any] = {}
        self._seen: set[str] = set()

    def where(self, key: str) -> str:
        return f"{self.name}.{key}"

    def _find(self, names: Sequence[str]) -> tuple[str, Any]:
        self._seen.update(names)
        present = [n for n in names if n in self.config]
        for name in present:
            if self.config[name] is not None:
                return name, self.config[name]
        if present:
            return present[0], None
        self._refuse_typo(names)
        for name in names:
            if name in self.defaults:
                if isinstance(self.defaults[name], int) and not isinstance(self.defaults[name], bool):
                    self.assumed[name] = self.defaults[name]
                return name, self.defaults[name]
        return names[0], MISSING

    def _refuse_typo(self, names: Sequence[str]) -> None:
        for key in self.config:
            if (
                key not in self._seen
                and key not in self.defaults
                and any(difflib.SequenceMatcher(None, key, n).ratio() >= TYPO for n in names if n != key)
            ):
                raise SpecError(f"unknown key {key[:80]!r}", self.name, nearest(key, names) or names[:1])

    def whole(self, *names: str, default: Any = MISSING, least: int = 1, most: int = 2**40) -> Any:
        """A whole number between `least` and `most`; `default` where it is nowhere, `SpecError` where there is no default either."""
        key, value = self._find(names)
        if value is MISSING or value is None:
            if default is not MISSING:
                return default
            raise SpecError(f"{key} is missing", self.name, nearest(key, self.config))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value in (float("inf"), -float("inf")):
            raise SpecError(f"{str(value)[:40]!r} is not a whole number", self.where(key))
        if value != int(value):
            raise SpecError(f"{value} is not a whole number", self.where(key), [int(value), int(value) + 1])
        if not least <= value <= most:
            raise SpecError(
                f"{str(int(value))[:40]} is not between {least} and {most}", self.where(key), [min(max(int(value), least), most)]
            )
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        key, value = self._find((name,))
        if value is MISSING or value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"{str(value)[:40]!r} is not true or false", self.where(key))
        return value

    def function(self, *names: str, default: str) -> str:
        """An activation by its configuration name, as the blocks' name for it."""
        key, value = self._find(names)
        if value is MISSING or value is None:
            return default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise SpecError(f"unknown activation {str(value)[:40]!r}", self.where(key), nearest(value, ACTIVATIONS) or ACTIVATIONS)
        return ACTIVATIONS[value]

    def wholes(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None where it is not there."""
        key, value = self._find((name,))
        if value is MISSING or value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= 2**40 for v in value):
            raise SpecError("is not a list of whole numbers", self.where(key))
        return value

    def kinds(self, name: str, layers: int, known: Sequence[str]) -> list[str] | None:
        """One word of `known` a layer (``layer_types``), or None where it is not there."""
        key, value = self._find((name,))
        if value is MISSING or value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise SpecError("is not a list of words", self.where(key))
        if len(value) != layers:
            raise SpecError(f"has {len(value)} entries for {layers} layers", self.where(key))
        for word in value:
            if word not in known:
                raise SpecError(f"unknown kind of layer {word[:40]!r}", self.where(key), nearest(word, known) or known)
        return value

    # What nearly every family has.

    def hidden(self, *names: str) -> int:
        return self.whole(*(names or ("hidden_size",)), most=MOST_HIDDEN)

    def layers(self, *names: str) -> int:
        return self.whole(*(names or ("num_hidden_layers",)), most=MOST_LAYERS)

    def ffn(self, *names: str, default: Any = MISSING) -> int:
        return self.whole(*(names or ("intermediate_size",)), default=default, most=2**24)

    def vocab(self) -> int:
        return self.whole("vocab_size", most=MOST_VOCAB)

    def positions(self, *names: str) -> int:
        """The longest sequence; a rotary or ALiBi model whose configuration does not say has no limit."""
        return self.whole(*(names or ("max_position_embeddings",)), default=UNBOUNDED)

    def tied(self, default: bool = False) -> bool:
        return self.flag("tie_word_embeddings", default)

    def notes(self) -> tuple[str, ...]:
        """What was not in the configuration and came from the family's defaults, one sentence."""
        if not self.assumed:
            return ()
        return ("not in the configuration, the family's defaults: " + ", ".join(f"{k} = {v}" for k, v in self.assumed.items()),)
