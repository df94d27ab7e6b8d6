"""Tests that a row's result does not depend on stale page contents or on other rows of the batch."""

import torch


def test_nonfinite_row_does_not_affect_others_or_later_requests(checkpoint, driver, ids):
    prompt = ids(10)
    want = checkpoint("llama").logits(prompt)
    engine = driver(checkpoint("llama").path, block_tokens=16)
    table = engine.model.vocabulary.table.clone()
    bad_token = next(token for token in range(3, 97) if token not in prompt)
    table[bad_token] = float("nan")
    engine.model.vocabulary.table = table
    bad, good = engine.add([bad_token] * 12), engine.add(prompt)
    engine.step([(bad, 6), (good, 5)])
    engine.step([(bad, 6), (good, 5)])
    assert bad.result.isnan().all()
    torch.testing.assert_close(good.result, want, atol=1e-4, rtol=0)
    heir = engine.add(prompt)
    heir.tables = bad.tables  # the block with the bad row's keys, in part overwritten
    for _ in prompt:
        engine.step([(heir, 1)])
    torch.testing.assert_close(heir.result, want, atol=1e-4, rtol=0)


def test_equal_steps_give_equal_bits(checkpoint, driver, ids):
    results = []
    for _ in range(2):
        engine = driver(checkpoint("qwen2-windows").path)
        rows = [engine.add(ids(length, length)) for length in (9, 14, 30)]
        engine.step([(rows[0], 8), (rows[1], 13), (rows[2], 7)])
        engine.step([(rows[2], 22), (rows[0], 1), (rows[1], 1)])
        results.append(torch.cat([row.result for row in rows]))
    assert torch.equal(*results)


def test_no_rows_give_no_logits(checkpoint, driver):
    engine = driver(checkpoint("llama").path)
    assert engine.model.logits(torch.empty(0, 48)).shape == (0, 97)


def test_only_the_pages_of_a_row_are_written(checkpoint, driver, ids):
    engine = driver(checkpoint("mistral").path, block_tokens=4)
    request = engine.add(ids(6))
    before = engine.pages.clone()
    engine.step([(request, 6)])
    changed = (engine.pages != before).flatten(4).any(-1)  # [blocks, layers, 2, block_tokens]
    for table in request.tables:
        first, second = table
        assert changed[first].all() and changed[second, :, :, :2].all()
        assert not changed[second, :, :, 2:].any()
    others = [block for block in range(changed.shape[0]) if all(block not in table for table in request.tables)]
    assert not changed[others].any()
