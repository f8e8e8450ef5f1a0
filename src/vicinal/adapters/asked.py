"""What a user calls: `methods.adapt`, with a word where an option that was given plays no part."""

import warnings
from typing import Any

from torch import nn

from vicinal.adapters import methods
from vicinal.adapters.contract import Adapter
from vicinal.checkpoint import Trained


def adapt(
    source: Trained | nn.Module,
    method: str = "vnl",
    *,
    features: str | None = None,
    head: str | None = None,
    inplace: bool = False,
    **options: Any,
) -> Adapter:
    """Return a live adapter of a trained model, or of any classifier.

    `features` and `head` name layers of a classifier of your own where they are not found by themselves. It
    is fed what its owner feeds it; a model of vicinal's takes images in [0, 1]. The model itself is left as
    it is unless `inplace`. Options override what was chosen on left-out source domains, which overrides the
    method's own defaults; another step size than the chosen one is taken as it is given. A warning names
    options that play no part, as a step size where nothing is updated.
    """
    adapter = methods.adapt(source, method, features=features, head=head, inplace=inplace, **options)
    if (note := methods.idle_note(method, adapter.settings, options)) is not None:
        warnings.warn(note, stacklevel=2)
    return adapter
