"""Derived seeds are the same in every version: a checkpoint goes on with the draws that it would have had."""

from etude import seeds


def test_derived_seeds_keep_their_values():
    assert seeds.batch_seed(7, 3, 2) == 448001538
    assert seeds.trajectory_seed(65, 4) == 31679210769422618
    assert seeds.request_seed(123456789, 3) == 123457159370658
    assert seeds.client_draw(3, 1, [5, 6, 7]) == 2091225978565
    assert seeds.trial_seed(7, 3) == 7000024
    assert seeds.probe_seed("probe") == 67391967144556166
    assert seeds.group_seed(65, 4) == 1536019977


def test_derived_orders_keep_their_values():
    assert seeds.epoch_order(1, 2, 8).tolist() == [6, 0, 7, 5, 1, 4, 3, 2]
    assert seeds.mini_batch_order((1, 2, 3), 8).tolist() == [4, 2, 6, 5, 1, 3, 7, 0]


def test_no_two_requests_of_a_batch_share_a_seed():
    drawn = {
        seeds.request_seed(seeds.trajectory_seed(seeds.batch_seed(1, step, attempt), index), number)
        for step in range(8)
        for attempt in range(3)
        for index in range(16)
        for number in range(8)
    }
    assert len(drawn) == 8 * 3 * 16 * 8
