"""Values of a `config.json`, with a family's defaults, checked as they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from uneven.errors import ModelError

Rule = bool | str
"""True, False, or the key of the configuration that decides."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`config` over `defaults`; `where` names the file in errors."""

    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str

    def get(self, key: str) -> Any:
        """The value as it stands; None where neither the file nor the family has one."""
        return self.config.get(key, self.defaults.get(key))

    def present(self, keys: tuple[str, ...]) -> str:
        """Of several names of one thing the one that the file has, else the first."""
        return next((key for key in keys if key in self.config), keys[0])

    def size(self, key: str, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.get(key)
        if type(value) is not int or value < least:
            raise ModelError(f"{self.where}: {key} must be a whole number of at least {least}, found {value!r}")
        return value

    def flag(self, rule: Rule) -> bool:
        """What a rule says for this configuration."""
        value = rule if isinstance(rule, bool) else self.get(rule) or False
        if type(value) is not bool:
            raise ModelError(f"{self.where}: {rule} must be true or false, found {value!r}")
        return value

    @property
    def num_heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads: as many as query heads where the configuration gives none."""
        if self.get("num_key_value_heads") is None:
            return self.num_heads
        num_kv_heads = self.size("num_key_value_heads")
        if self.num_heads % num_kv_heads:
            raise ModelError(
                f"{self.where}: num_attention_heads {self.num_heads} must be a multiple of num_key_value_heads "
                f"{num_kv_heads}"
            )
        return num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head; even, since rotary embeddings turn pairs of channels."""
        head_dim = self.even_head_dim if self.get("head_dim") is None else self.size("head_dim")
        if head_dim % 2:
            raise ModelError(f"{self.where}: head_dim must be even, for rotary embeddings, found {head_dim}")
        return head_dim

    @property
    def even_head_dim(self) -> int:
        """The hidden width divided evenly among the heads."""
        hidden, num_heads = self.size("hidden_size"), self.num_heads
        if hidden % num_heads:
            raise ModelError(
                f"{self.where}: hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}; set head_dim"
            )
        return hidden // num_heads
