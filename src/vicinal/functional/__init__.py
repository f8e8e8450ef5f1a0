"""Pure maths: no state, no disk, no printing."""
