from tests.engine.forked_ranks import forked_ranks as forked_ranks  # a fixture
