"""C1, C11, C18: when a call runs live, is recorded, waits or is given up. A policy decides that without any device: here calls
come one after the other, and a word says what becomes of each (`L`: runs live, as a warm-up; `R`: is recorded; `P`: is played;
`-`: is refused, and runs live)."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from phonograph.call.signature import describe
from phonograph.capture.recording import BEGINS_ANEW, MEMORY
from phonograph.engine import policy as rules
from phonograph.engine.backoff import ATTEMPTS, CHANGES, EVER_NEW, FEW_SHAPES, FIRST_WAIT, FORGIVEN, UNLUCKY, Backoff
from phonograph.engine.budget import SHARE
from phonograph.engine.player import uses
from phonograph.engine.policy import RULES, Policy, Step
from phonograph.engine.shelf import Shelf
from phonograph.errors import Refusal, Unseen
from phonograph.guards.followed_numbers import Following
from phonograph.memory.spans import Spans
from phonograph.options import Options
from phonograph.slots.gradients import GRAD
from phonograph.statistics import Counters
from phonograph.values.wording import Naming


class Recording:
    """A recording that was made of nothing, and its player."""

    def __init__(self, key):
        self.key, self.recording = key, self
        self.copied, self.backward, self.footprint, self.live_parts = (), None, Spans(), True
        constants = SimpleNamespace(numbers_changed=list, object_stands_at=lambda name: False)
        self.table = SimpleNamespace(constants=constants)
        self.played = self.used = self.cost = 0
        self.saves = None
        self.gone = True
        self.play()

    def play(self):
        self.played, self.used = self.played + 1, next(uses)

    def grads_gone(self):
        return self.gone

    def other_decision(self, broken):
        return None  # it has taken none

    def close(self):
        pass


class Described:
    """How calls are described."""

    marked = False

    def __init__(self):
        self.following = Following()

    def named(self):
        return Naming()

    def read_at(self, name, call):
        return "train.py:1"


class Function:
    """A function of one tensor. Its captures come to nothing while they are `refused`."""

    def __init__(self, watches_sizes=True, **options):
        self.counters, self.options = Counters(), Options(**options)
        self.shelf = Shelf(self.options.max_recordings)
        self.described = Described()
        self.backoff = Backoff(self.options, self.counters, self.shelf, self.described, frozenset())
        self.policy = Policy(self.backoff, self.options, self.counters, self.shelf, self.described,
                             watches_sizes=watches_sizes)  # fmt: skip
        self.refused, self.takes = None, 0  # seconds of a capture; a live call takes one
        self.why, self.captured = [], []  # the reasons of refused calls; the numbers of those that were captured

    def history(self, n=3):
        return self.backoff.history(describe((torch.ones(n),), {}).key)

    def call(self, *args, **kwargs):
        """What becomes of a call with so many numbers."""
        word = self._call(*args, **kwargs)
        if word in "L-":
            self.backoff.budget.ran(1.0)
        return word

    def _call(self, n=3, broken=None, blocked=0, obstructed=False):
        call, self.counters.calls = describe((torch.ones(n),), {}), self.counters.calls + 1
        players, anew = self.shelf.of(call.key), bool(broken or blocked or obstructed)
        if players and not anew:
            players[0].play()
            self.counters.replayed += 1
            return "P"
        history = self.backoff.history(call.key)
        try:
            standing = self.backoff.refused(history)
            if standing is not None:
                raise standing
            case = self.policy.case(call, history, broken, blocked, obstructed)
            if self.policy.next(case) is Step.WARM_UP:
                return "L"
            self._capture(case)
        except Refusal as refusal:
            self.why.append(refusal.reason)
            return "-"
        return "R"

    def _capture(self, case):
        case.history.attempts.tried = True
        self.captured.append(self.counters.calls)
        self.backoff.budget.attempted(self.takes)
        if self.refused is not None:
            self.backoff.capture_failed(case.call, self.refused, case.history, changed=case.broken is not None)
            if self.refused.failed:
                self.backoff.live_run_succeeded(self.refused)
            self.backoff.budget.lose(self.takes, self.refused)
            raise self.refused
        self.shelf.drop(case.call.key, lambda _: case.broken is not None)
        made = Recording(case.call.key)
        made.cost = self.takes
        self.shelf.add(case.call.key, made)
        self.counters.replayed += 1

    def calls(self, times, *args, **kwargs):
        return "".join(self.call(*args, **kwargs) for _ in range(times))


# -- in the ordinary case


@pytest.mark.parametrize(("warmup", "expected"), [(0, "RPPP"), (1, "LRPP"), (3, "LLLR")])
def test_c01_a_signature_is_recorded_after_its_warm_ups(warmup, expected):
    assert Function(warmup=warmup).calls(4) == expected


def test_c01_each_signature_has_warm_ups_of_its_own():
    f = Function()
    assert "".join(f.call(n) for n in (3, 9, 3, 9, 3, 9)) == "LLRRPP"


def test_the_last_rule_fits_every_call():
    assert RULES[-1].when(Function().policy, None)
    assert RULES[-1].step is Step.RECORD


# -- after a change


def test_c08_what_changes_runs_live_once_before_it_is_recorded_again():
    f = Function()
    assert f.calls(3) + f.calls(2, broken="model.scale") + f.calls(1) == "LRPLRP"


def test_c08_without_warm_ups_it_is_recorded_at_once():
    f = Function(warmup=0)
    assert f.calls(2) + f.calls(2, broken="model.scale") == "RPRR"


@pytest.mark.parametrize(("broken", "marked", "gone", "expected"), [
    (GRAD, False, True, "R"), (GRAD, False, False, "L"), (GRAD, True, True, "L"), (MEMORY, True, False, "R"),
])  # fmt: skip
def test_c06_a_live_call_first_only_where_code_of_the_users_may_be_new(broken, marked, gone, expected):
    f = Function()
    f.calls(2)
    f.described.marked = marked
    for player in f.shelf:
        player.gone = gone
    assert f.call(broken=broken) == expected


def test_c06_gradients_and_other_changes_each_have_their_live_call():
    f = Function()
    f.calls(2)
    assert f.call(broken="x") + f.call(broken=BEGINS_ANEW) + f.call(broken="x") == "LLR"


def test_c18_what_changes_again_and_again_waits_twice_as_long_each_time():
    f = Function()
    f.calls(2)
    assert f.calls(2 * CHANGES, broken="model.scale") == "LR" * CHANGES
    assert f.calls(FIRST_WAIT, broken="model.scale") == "-" * FIRST_WAIT
    assert f.why[0] == "model.scale changes from call to call"
    assert f.calls(2 * FIRST_WAIT + 3, broken="model.scale") == "LR" + "-" * (2 * FIRST_WAIT) + "L"


def test_c18_changes_are_counted_without_warm_ups_too():
    f = Function(warmup=0)
    assert f.calls(2) + f.calls(CHANGES + 1, broken="model.scale") == "RP" + "R" * CHANGES + "-"


def test_c18_changes_are_forgotten_while_a_refusal_stands():
    f, change = Function(), [None]
    f.calls(2)
    f.calls(2 * CHANGES, broken="model.scale")
    f.shelf.clear()
    f.backoff.refuse(f.history(), Refusal("is in training"), SimpleNamespace(changed=lambda calls, given: change[0]))
    assert f.calls(CHANGES * FORGIVEN) == "-" * CHANGES * FORGIVEN
    change[0] = "model.training"
    assert f.calls(3) == "LRP"


def test_c18_rare_changes_are_forgotten():
    f = Function()
    f.calls(2)
    for _ in range(5 * CHANGES):
        assert f.calls(2, broken="model.scale") == "LR"
        f.calls(FORGIVEN)
    assert not f.why


# -- captures that fail


def test_c11_a_lasting_reason_ends_it_at_once_and_a_passing_one_after_three_captures():
    for final, captures in ((True, 1), (False, ATTEMPTS)):
        f = Function()
        f.refused = Refusal("needs the host", final=final)
        assert f.calls(9) == "L" + "-" * 8
        assert len(f.captured) == captures


def test_c11_a_failed_capture_counts_when_the_live_run_has_not_failed():
    f = Function()
    f.refused = Refusal("raises", failed=True)
    assert f.calls(ATTEMPTS + 1) == "L" + "-" * ATTEMPTS
    f.refused = None
    assert f.call() == "-"


def test_c11_a_reason_of_this_call_alone_does_not_count():
    f = Function()
    f.refused = Refusal("gets a borrowed output", this_call=True)
    f.calls(20)
    f.refused = None
    assert f.calls(2) == "RP"


def test_c11_what_has_not_run_yet_is_tried_after_more_and_more_calls():
    f = Function()
    f.refused = Unseen("an operator has not run")
    f.calls(60)
    gaps = [b - a for a, b in pairwise(f.captured)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 2 * gaps[0]


def test_c11_a_refusal_stands_while_its_grounds_hold():
    f, change = Function(), [None]
    f.calls(1)
    f.backoff.refuse(f.history(), Refusal("is in training"), SimpleNamespace(changed=lambda calls, given: change[0]))
    assert f.calls(5) == "-----"
    change[0] = "model.training"
    assert f.calls(3) == "LRP"  # as what has changed since a recording


def test_c11_attempts_wait_until_the_calls_have_taken_twenty_times_as_long():
    """Whatever the signatures: one that is like others which could not be recorded most likely cannot be either."""
    f = Function()
    f.refused, f.takes = Refusal("needs the host", where="train.py:3"), 10
    sizes = [5, 3, 9, 4, 17, 8]
    assert ["".join(f.call(n) for _ in range(2)) for n in sizes] == ["L-"] * 6
    assert f.captured == [2, 4]  # the first was free
    assert {*f.why} == {"needs the host"}
    f.refused = None
    words = f.calls(600, 8)
    assert 350 <= words.index("R") < 450
    assert "-" not in words.lstrip("-")


def test_c22_a_recording_that_has_saved_what_it_cost_is_no_loss():
    f = Function()
    f.takes = 10
    f.calls(2)
    for _ in range(4 * CHANGES):
        assert f.calls(2, broken="model.scale") + f.calls(48) == "LR" + "P" * 48
    assert not f.why


def test_c22_recordings_that_are_played_too_seldom_are_soon_made_no_more():
    f = Function()
    f.takes = 10
    f.calls(2)
    words = f.calls(400, broken="model.scale")
    assert words.count("R") <= 1 + len(words) * SHARE / f.takes
    assert f.why[0] == "model.scale changes from call to call"
    assert "R" in f.calls(800, broken="model.scale")  # it is tried again


# -- sizes and signatures


def test_c18_sizes_that_grow_run_live():
    f = Function()
    assert "".join(f.call(n) for n in range(3, 9)) == "LL----"
    assert "grows each time" in f.why[0]


def test_c18_of_signatures_that_are_new_nearly_each_time_none_is_recorded():
    f = Function()
    words = "".join(f.call(3 + 37 * n % 101) for n in range(70))
    assert words == "L" * 64 + "-" * 6
    assert "nearly each time" in f.why[0]
    assert "had a signature of their own" in next(f.backoff.explain())


def test_c18_signatures_in_rotation_keep_their_recordings():
    f = Function(max_recordings=1)
    assert f.calls(3, 3) == "LRP"
    words = "".join(f.call(3) + f.call(9) for _ in range(rules.ROOM + 2))
    assert words == "PL" + "P-" * (rules.ROOM + 1)
    assert "more signatures in rotation" in f.why[0]
    assert f.calls(40, 9) == "-" * 15 + "R" + "P" * 24  # the other is not played any more


def test_c18_recordings_that_nobody_plays_again_are_not_made_for_ever():
    f = Function(watches_sizes=False, max_recordings=2)
    f.takes = 10
    words = "".join(f.calls(2, n) for n in (5, 3, 9, 4, 17, 8, 23, 6))
    assert words == "LR" * 4 + "L-" * 4
    assert "new signature" in f.why[0]
    assert "R" in f.calls(900, 40)  # it comes again that often


# -- what is in the way


def test_c05_what_others_hold_is_waited_for():
    f = Function()
    f.calls(2)
    assert f.calls(30, obstructed=True) == "L" * 30


def test_c05_held_outputs_are_recorded_around_a_few_times():
    f = Function()
    f.calls(2)
    assert f.call(blocked=rules.BLOCKED) + f.call(blocked=rules.BLOCKED + 1) == "R-"
    assert "are held" in f.why[0]


def test_c06_as_many_calls_as_recordings_may_wait_for_their_backward():
    f = Function(max_recordings=4)
    f.calls(2)
    f.history().capture.attached = True
    assert f.call(blocked=3) + f.call(blocked=4) == "R-"


# -- replays that could not go on


def diverged(decided, torn=""):
    return SimpleNamespace(decided=decided, torn=torn, said="`x.item()`", reason="gives another shape", remedy="", where="")


def test_c11_a_number_that_is_another_in_each_call_is_waited_for():
    f = Function()
    f.calls(2)
    key = describe((torch.ones(3),), {}).key
    for n in range(1, UNLUCKY + 2):
        f.backoff.diverged(f.history(), key, diverged(decided=True))
        f.backoff.diverges(f.history(), diverged(decided=True), None)
        assert len(f.shelf) == (n < UNLUCKY)
    assert f.calls(FIRST_WAIT) == "-" * (FIRST_WAIT - 1) + "R"


def test_c11_another_shape_drops_the_recording_and_too_many_give_it_up():
    f = Function()
    f.calls(2)
    key = describe((torch.ones(3),), {}).key
    for _ in range(CHANGES):
        f.backoff.diverged(f.history(), key, diverged(decided=False))
        f.backoff.diverges(f.history(), diverged(decided=False), None)
        assert f.calls(1) == "R"
    f.backoff.wait(f.history(), Refusal("changes from call to call"))
    f.backoff.diverged(f.history(), key, diverged(decided=False))
    f.backoff.diverges(f.history(), diverged(decided=False), None)
    assert f.calls(200) == "-" * 200


def test_c13_a_replay_that_was_torn_is_remembered():
    """Live calls are noted strictly from then on: no marked function may do again what a replay could not go on after."""
    f = Function()
    f.calls(2)
    key, history = describe((torch.ones(3),), {}).key, f.history()
    assert not history.divergence.torn
    for torn in ("writes what one was given before it", ""):
        f.backoff.diverged(history, key, diverged(decided=False, torn=torn))
        assert history.divergence.torn


def _kinds(kind=Refusal):
    return [kind, *(one for below in kind.__subclasses__() for one in _kinds(below))]


@pytest.mark.parametrize("kind", _kinds())
def test_c11_a_reason_that_is_refined_can_be_told_again(kind):
    """It may have been made from something else than its words, or by names alone."""
    first = kind.__new__(kind)
    vars(first).update(vars(Refusal(reason="needs the host", remedy="leave it out")), site=3)
    other = first.but(failed=True)
    again = other.at("here.py:1")
    assert (type(again), again.failed, again.where, again.remedy, again.site) == (kind, True, "here.py:1", "leave it out", 3)
    assert (first.failed, first.where, other.where) == (False, "", "")
    assert str(again).startswith("needs the host at here.py:1")


@pytest.mark.parametrize("cut", [True, False])
def test_c11_a_call_that_is_cut_and_costs_too_much_says_what_cuts_it(cut):
    """And not that its signature is new: it has come before."""
    f = Function()
    history, why = f.history(), Refusal("`loss.item()` reads a tensor's value on the host", "return the tensor", "train.py:9")
    f.backoff.budget.attempted(1.0)
    f.backoff.budget.lose(1e6)
    history.capture.why = why if cut else None
    told = f.backoff.pays_for(describe((torch.ones(3),), {}), history, None)
    assert told.reason == (why.reason if cut else EVER_NEW)
    assert (told.remedy, told.where) == ((why.remedy, why.where) if cut else (FEW_SHAPES, ""))


def test_c11_what_changes_is_told_with_what_to_do_about_it():
    """A check asks for that before there is a refusal. Gradients are left out, which come back to where they were."""
    f = Function()
    call = describe((torch.ones(3),), {})
    for name in ("cache.pos (by which it goes on)", "settings.rate", GRAD):
        f.backoff.changed(name, f.history(), call)
    first, second = f.backoff.changing()
    assert first.reason == "cache.pos (by which it goes on) changes from call to call"
    assert "index_copy_" in first.remedy
    assert "t.fill_(n)" in second.remedy
    assert second.where == "train.py:1"


@pytest.mark.parametrize("times", [0, 1, 2])
def test_c11_what_has_changed_once_is_not_told_as_if_it_did_so_in_each_call(times):
    """The recordings before have cost too much for another one, whatever it is that has changed last."""
    f = Function()
    call = describe((torch.ones(3),), {})
    f.backoff.budget.attempted(1.0)
    f.backoff.budget.lose(1e6)
    for _ in range(times):
        f.backoff.changed("config.layers", f.history(), call)
    told = f.backoff.pays_for(call, f.history(), "config.layers")
    assert ("changes from call to call" in told.reason) == (times > 1)
    assert ("config.layers has changed, and what recordings have cost" in told.reason) == (times <= 1)
