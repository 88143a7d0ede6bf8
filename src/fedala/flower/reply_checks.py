"""Why a server drops a client's reply: it is not what the request asked for.

`messages.py` refuses malformed records, `arrays.py` tensors, `nodes.py` unknown senders.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedala.errors import UserError
from fedala.flower.arrays import check_distance, unpack_message
from fedala.flower.messages import MAX_LOSS, Reply
from fedala.lanes import Message
from fedala.lanes.trees import take
from fedala.metrics import ACCURACY, Metric
from fedala.simulation.client_round import CohortResult, RoundRequest


class OtherSamples(UserError):
    """A reply whose numbers of samples differ from those of the client's introduction."""


def check_reply(
    reply: Reply,
    client: int,
    request: RoundRequest,
    sent: Message,
    *,
    template: Message,
    parts: Sequence[str],
    sizes: Mapping[str, int],
    max_norm: float,
    metric: Metric = ACCURACY,
) -> CohortResult:
    """Check a reply, and return it as the result of a cohort of this one client.

    `template` is an upload of one lane; `sizes` are the samples that the client introduced itself
    with. With `max_norm` > 0, a model further than this from the one that was sent is refused.
    """
    if reply.client != client:
        raise UserError(f"it says that it is client {reply.client}")
    tests_trained = request.train and request.evaluate_after_training
    result = CohortResult(
        [(0, client)],
        {n: torch.tensor([value], dtype=torch.float64) for n, value in reply.notes.items()},
        upload=take(template, slice(0)),
        is_finite=torch.tensor([reply.is_finite]) if request.train else None,
        scores=_check_scores(reply.scores, request.evaluate, parts, "scores", metric),
        scores_after_training=_check_scores(
            reply.trained_scores, tests_trained, parts, "scores after training", metric
        ),
    )
    _check_sizes(reply, result, parts, sizes)
    if request.train and reply.is_finite:
        result.upload = unpack_message(reply.arrays, template)
        if max_norm:
            check_distance(result.upload.model, sent.model, max_norm)
    elif reply.arrays:
        raise UserError("it sends arrays, but should not send any")
    elif not request.train and not reply.is_finite:
        raise UserError("it says that it diverged, but it did not train")
    return result


def _check_sizes(
    reply: Reply, result: CohortResult, parts: Sequence[str], sizes: Mapping[str, int]
) -> None:
    """Refuse numbers of samples that differ from the client's introduction."""
    reported, expected = [reply.examples], [sizes["train"]]
    for table in (result.scores, result.scores_after_training):
        if table:
            reported += [int(score[0, 2]) for score in table]
            expected += [sizes[part] for part in parts]
    if reported != expected:
        raise OtherSamples("its numbers of samples differ from those of its introduction")


def _check_scores(
    values: list[float], is_requested: bool, parts: Sequence[str], name: str, metric: Metric
) -> list[Tensor]:
    """Return scores as [lane, (summed score, summed loss, samples)] for each part.

    Correct answers are a whole number, at most the number of samples. A loss or an error may be
    infinite or NaN: an honest client's model may have become too large.
    """
    expected = 3 * len(parts) if is_requested else 0
    if len(values) != expected:
        raise UserError(f"its {name} are {len(values)} numbers, but should be {expected}")
    table = torch.tensor(values, dtype=torch.float64).view(-1, 1, 3)
    for score, loss, samples in table[:, 0].tolist():
        is_possible = samples.is_integer() and samples >= 0 and _is_possible_sum(loss)
        if metric.is_share:
            is_possible &= 0 <= score <= samples and (metric != ACCURACY or score.is_integer())
        else:
            is_possible &= _is_possible_sum(score)
        if not is_possible:
            what = "correct" if metric == ACCURACY else metric.title
            raise UserError(
                f"its {name} are not possible: {score:g} of {samples:g} {what}, a loss of {loss:g}"
            )
    return list(table)


def _is_possible_sum(value: float) -> bool:
    """Tell whether a sum of losses or errors is not negative, and not absurdly large."""
    return not (value < 0 or MAX_LOSS < value < math.inf)
