"""The lower bound of a step, compared with the linear programme that it bounds from below."""

from __future__ import annotations

import numpy as np
import pytest

from hetpipe.plan.bound import shared_s


def optimum_s(times_s):
    """Return the linear programme's optimum by HiGHS, which divides layers freely among devices."""
    optimize = pytest.importorskip("scipy.optimize")
    devices, layers = times_s.shape
    count = devices * layers
    objective = np.zeros(count + 1)
    objective[-1] = 1.0
    loads = np.zeros((devices, count + 1))
    whole = np.zeros((layers, count + 1))
    for device in range(devices):
        for layer in range(layers):
            loads[device, device * layers + layer] = times_s[device, layer]
            whole[layer, device * layers + layer] = 1.0
        loads[device, -1] = -1.0
    solved = optimize.linprog(
        objective, A_ub=loads, b_ub=np.zeros(devices), A_eq=whole, b_eq=np.ones(layers)
    )
    return solved.fun


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_is_below_the_optimum_and_near_it(seed):
    draw = np.random.default_rng(seed)
    devices, layers = draw.integers(1, 7), draw.integers(1, 30)
    speeds = 2 ** draw.uniform(-2, 2, (devices, 1))
    times_s = draw.uniform(0.5, 2, (1, layers)) * draw.uniform(0.5, 1.5, (devices, layers)) / speeds
    bound_s, best_s = shared_s(times_s), optimum_s(times_s)
    assert bound_s <= best_s * (1 + 1e-9)
    assert bound_s >= 0.97 * best_s


def test_devices_with_proportional_times():
    times_s = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    assert shared_s(times_s) == pytest.approx(4.0)  # 6 s on one, 12 s on the other


def test_a_device_that_takes_no_time():
    assert shared_s(np.array([[1.0, 2.0], [0.0, 0.0]])) == 0.0
    assert shared_s(np.array([[1.0, 2.0], [0.0, 3.0]])) == pytest.approx(1.2)  # 3/5 of layer 1


def test_many_equal_devices():
    assert shared_s(np.ones((512, 100))) == pytest.approx(100 / 512)
