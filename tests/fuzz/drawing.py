"""`by_hypothesis` makes a test of what makes random programs."""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st


def by_hypothesis(make: Callable[[Any], Any], variable: str, default: int) -> Callable[[Callable[..., None]], Any]:
    """A test of as many of these programs as an environment variable says, from seed PHONOGRAPH_FUZZ_SEED (0)."""

    @st.composite
    def programs(draw: Any) -> Any:
        return make(lambda options: draw(st.sampled_from(options)))

    def decorate(test: Callable[..., None]) -> Any:
        slow = [HealthCheck.function_scoped_fixture,  # the device is the same for every program
                HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]  # fmt: skip
        chosen = settings(
            max_examples=int(os.environ.get(variable, default)), deadline=None, database=None, suppress_health_check=slow
        )
        return seed(int(os.environ.get("PHONOGRAPH_FUZZ_SEED", "0")))(chosen(given(program=programs())(test)))

    return decorate
