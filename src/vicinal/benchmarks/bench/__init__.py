"""How fast training and adaptation are, against plain PyTorch and against arithmetic that must be done."""
