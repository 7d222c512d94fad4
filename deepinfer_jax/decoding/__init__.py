"""From logits to tokens: sampling and the generation loop (spec 9.6)."""
