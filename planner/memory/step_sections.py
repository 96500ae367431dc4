"""Names of a step's sections, the same in the predicted and in the measured timeline."""

from __future__ import annotations


def section_label(section: str, layer: int = 0) -> str:
    """Return the label of a section as the templates name it: "layer 3 backward", "loss".

    Layers of every kind ("first_layer", "layer", ...) are told apart by their number alone.
    """
    direction = " backward" if section.endswith("_backward") else ""
    name = section.removesuffix("_backward")
    return (f"layer {layer}" if name.endswith("layer") else name) + direction


def section_words(label: str) -> str:
    """Return a section's label as people read it; layers are counted from 0, as in checkpoints."""
    name, _, rest = label.partition(" ")
    return " ".join(filter(None, (_WORDS.get(name, name), rest)))


_WORDS = {
    "embed": "embedding",
    "head": "final norm",
    "loss": "logits and loss",
    "optimizer": "optimizer step",
}
