"""The default policy, as a pure function."""

from cluster.types import WorkerId
from router.policy import DecodeView, LeastLoaded, PrefillView, RouteRequest, RoutingView

P0, P1 = WorkerId("prefill-0"), WorkerId("prefill-1")
D0, D1 = WorkerId("decode-0"), WorkerId("decode-1")


def _prefill(worker, queued=0, rate=1000.0, pool=10_000):
    return PrefillView(worker, queued, rate, pool)


def _decode(worker, requests=0):
    return DecodeView(worker, requests, 10_000, 1000.0, 0.05)


def _view(prefill=(), decode=(), *, disaggregated=True, local_max=0):
    return RoutingView(tuple(prefill), tuple(decode), disaggregated, local_max)


def test_the_least_loaded_pair_wins_and_ties_go_to_the_lower_id():
    view = _view([_prefill(P1, 10), _prefill(P0, 500)], [_decode(D1, 1), _decode(D0, 2)])
    decision = LeastLoaded().choose(view, RouteRequest(100, 10))
    assert (decision.kind, decision.prefill, decision.decode) == ("split", P1, D1)
    view = _view([_prefill(P1), _prefill(P0)], [_decode(D1), _decode(D0)])
    decision = LeastLoaded().choose(view, RouteRequest(100, 10))
    assert (decision.prefill, decision.decode) == (P0, D0)


def test_without_prefill_workers_decode_computes_the_prompt_and_says_degraded():
    decision = LeastLoaded().choose(_view([], [_decode(D0)]), RouteRequest(100, 10))
    assert (decision.kind, decision.prefill, decision.decode) == ("local", None, D0)
    assert decision.degraded


def test_aggregated_mode_is_local_and_not_degraded():
    view = _view([], [_decode(D0)], disaggregated=False)
    decision = LeastLoaded().choose(view, RouteRequest(100, 10))
    assert decision.kind == "local"
    assert not decision.degraded


def test_a_long_prefill_queue_means_wait():
    view = _view([_prefill(P0, queued=5000)], [_decode(D0)])
    assert LeastLoaded().choose(view, RouteRequest(100, 10)).kind == "wait"


def test_short_prompts_stay_local_only_when_configured_and_not_forced_to_split():
    view = _view([_prefill(P0)], [_decode(D0)], local_max=64)
    assert LeastLoaded().choose(view, RouteRequest(64, 10)).kind == "local"
    assert LeastLoaded().choose(view, RouteRequest(64, 10, "split")).kind == "split"
    assert LeastLoaded().choose(view, RouteRequest(65, 10)).kind == "split"
    assert LeastLoaded().choose(view, RouteRequest(65, 10, "local")).kind == "local"


def test_a_prompt_larger_than_a_prefill_pool_goes_local():
    view = _view([_prefill(P0, pool=50)], [_decode(D0)])
    assert LeastLoaded().choose(view, RouteRequest(100, 10)).kind == "local"
