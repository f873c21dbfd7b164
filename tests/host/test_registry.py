"""A merge method is entered wherever one is needed."""

from __future__ import annotations

from mergekit_slta.host.registry import METHODS
from mergekit_slta.output import card
from mergekit_slta.recipe.settings import SETTINGS


def test_every_method_is_known_to_mergekit_and_has_its_sentence_on_cards() -> None:
    for method in SETTINGS.keys() | METHODS.keys():
        assert method in SETTINGS, f"enter the settings class of '{method}' into SETTINGS in recipe/settings.py"
        assert method in METHODS, f"enter the class of '{method}' into MERGES in host/registry.py"
        assert method in card._IN_WORDS, f"add a sentence on '{method}' to _IN_WORDS in output/card.py"
