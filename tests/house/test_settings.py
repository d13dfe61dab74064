"""Environment variables: their defaults, what they may be, what is said where they are wrong."""

from __future__ import annotations

import pytest

from attn_dispatch import settings
from attn_dispatch.errors import InvalidInput
from attn_dispatch.settings import Number

NUMBERS = [value for value in vars(settings).values() if isinstance(value, Number)]


def test_there_are_some() -> None:
    assert len(NUMBERS) == 7


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.variable)
@pytest.mark.parametrize("text", ["x", "nan", "-1", "1e7x", "-inf"])
def test_what_is_wrong_is_named(number: Number, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(number.variable, text)
    with pytest.raises(InvalidInput) as raised:
        number()
    assert str(raised.value) == f"${number.variable} must be {number.what}, got {text!r}"


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.variable)
def test_defaults_and_bounds(number: Number, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(number.variable, raising=False)
    assert number() == number.default
    for text in ("", str(number.default)):
        monkeypatch.setenv(number.variable, text)
        assert number() == number.default
    for bound in (number.low, number.high):
        monkeypatch.setenv(number.variable, str(bound))
        assert number() == bound
