"""Who may predict after the updates of a rule, tried on what models saw along left-out streams."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from vicinal.adapters.labeler import StreamLabeler
from vicinal.adapters.neighborhood import Neighborhood
from vicinal.adapters.vnl_settings import VOTES, VnlSettings
from vicinal.functional.neighbors import side_by_side
from vicinal.models.inference import StreamInferenceNet
from vicinal.training.config import OutOfFoldConfig
from vicinal.training.fit_phi import fit_phi
from vicinal.training.left_out import Lesson
from vicinal.types import Head


@dataclass(frozen=True, eq=False)
class After:
    """What models saw along left-out streams under a rule, and what they do that are not updated."""

    lessons: Sequence[Lesson]
    still: Sequence[Lesson]
    domains: Sequence[str]  # which each stream is of


def by_labels(after: After, config: OutOfFoldConfig, seed: int) -> list[Tensor]:
    """Return label predictions of every stream by a phi that was fitted on all streams of other domains.

    What phi has to be good for is a domain that neither it nor the model ever saw. Draws of w are as many as
    `vnl` takes.
    """
    phis, draws = fitted_without(after.domains, after.lessons, config, seed), VnlSettings().num_samples
    every = zip(after.domains, after.lessons, strict=True)
    return [label_lesson(phis[domain], lesson, draws) for domain, lesson in every]


def fitted_without(
    domains: Sequence[str], lessons: Sequence[Lesson], config: OutOfFoldConfig, seed: int
) -> dict[str, StreamInferenceNet]:
    """Return, for each domain, a phi that was fitted on the lessons of all others.

    A single domain has none to learn from but itself.
    """
    every = list(zip(domains, lessons, strict=True))
    others = {domain: [lesson for name, lesson in every if name != domain] for domain in domains}
    return {domain: fit_phi(others[domain] or lessons, config, seed) for domain in others}


@torch.no_grad()
def label_lesson(phi: StreamInferenceNet, lesson: Lesson, num_samples: int = 0) -> Tensor:
    """Return the labels phi gives online along a recorded stream (M, C)."""
    labeler = StreamLabeler(phi, first_head(lesson))
    generator = torch.Generator(device=lesson.z.device).manual_seed(0)
    steps = zip(lesson.z, lesson.logits, lesson.head.weight, lesson.head.bias, strict=True)
    return torch.cat([labeler(z, logits, Head(w, b), num_samples, generator) for z, logits, w, b in steps])


def by_neighbors(after: After, config: OutOfFoldConfig, seed: int) -> list[Tensor]:
    """Return the votes of nearest neighbors along every stream, taken as they will be at test time."""
    settings = VnlSettings(**VOTES[config.votes])
    both = zip(after.lessons, after.still, strict=True)
    return [vote_lesson(lesson, settings, still) for lesson, still in both]


@torch.no_grad()
def vote_lesson(lesson: Lesson, settings: VnlSettings, still: Lesson | None = None) -> Tensor:
    """Return the labels that nearest neighbors give online along a recorded stream (M, C).

    `still` is what the model saw there that is not updated, for neighbors that are near by its features too.
    """
    seen, spaces, head = lesson.z, 1, first_head(lesson)
    if settings.joint and still is not None:
        seen, spaces = side_by_side(lesson.z, still.z), 2
    neighborhood = Neighborhood(settings.crowd_size(len(head.bias)), head, spaces)
    voted = []
    for z, logits in zip(seen, lesson.logits, strict=True):
        y = logits.softmax(-1)
        voted.append(neighborhood(z, y, settings.neighbors, settings.tau, settings.voted, settings.rounds))
        neighborhood.keep(z, y)
    return torch.cat(voted)


def first_head(lesson: Lesson) -> Head:
    """Return the classifier that a stream met first."""
    return Head(lesson.head.weight[0], lesson.head.bias[0])


# Who may predict besides own output, each by what was seen on left-out streams.
PREDICTORS: Mapping[str, Callable[[After, OutOfFoldConfig, int], list[Tensor]]] = MappingProxyType(
    {"labels": by_labels, "neighbors": by_neighbors}
)
