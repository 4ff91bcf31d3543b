from async_rl.queue.core.prompts import PromptStream, StreamCursor


def draw_all(stream: PromptStream, count: int) -> list[int]:
    return [p for _ in range(count) if (p := stream.draw()) is not None]


def test_every_epoch_is_an_order_of_all_rows_and_no_two_are_alike():
    stream = PromptStream(50, seed=3)
    epochs = [[stream.locate(epoch * 50 + i)[0] for i in range(50)] for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_position_names_the_same_row_in_another_process():
    first, second = PromptStream(50, seed=3), PromptStream(50, seed=3)
    second.cursor = StreamCursor(120)
    assert [first.locate(p) for p in (120, 7, 49)] == [second.locate(p) for p in (120, 7, 49)]


def test_another_seed_is_another_order():
    a, b = PromptStream(50, seed=1), PromptStream(50, seed=2)
    assert [a.locate(i) for i in range(50)] != [b.locate(i) for i in range(50)]


def test_positions_that_come_back_are_drawn_first_in_stream_order():
    stream = PromptStream(10, seed=0)
    assert draw_all(stream, 5) == [0, 1, 2, 3, 4]
    for position in (3, 1):
        stream.requeue(position)
    assert draw_all(stream, 3) == [1, 3, 5]


def test_the_stream_ends_after_its_epochs_but_not_before_what_came_back():
    stream = PromptStream(2, seed=0, epochs=2)
    assert draw_all(stream, 9) == [0, 1, 2, 3]
    assert stream.exhausted
    stream.requeue(2)
    assert not stream.exhausted
    assert draw_all(stream, 2) == [2]


def test_without_shuffle_rows_come_in_file_order():
    stream = PromptStream(3, seed=0, shuffle=False)
    assert [stream.locate(i) for i in range(4)] == [(0, 0), (1, 0), (2, 0), (0, 1)]
