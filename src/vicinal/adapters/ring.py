"""The last samples of a stream in tensors that stay where they are: the next one takes the oldest's place."""

import torch
from torch import Tensor


def next_places(count: Tensor, size: int, new: int) -> Tensor:
    """Return where so many new samples go after `count` others; of more than there is room for, the last."""
    places = (count + torch.arange(new, device=count.device)) % size
    return places[-size:]


def taken(count: Tensor, size: int) -> Tensor:
    """Return which places (size,) hold a sample after `count` of them."""
    return torch.arange(size, device=count.device) < count
