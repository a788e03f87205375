"""Pages against a naive model: never handed out twice, never lost, found by their tokens, evicted in order."""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve.engine.pages import PagePool

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), max_size=9)  # few, so that prompts begin alike
WHICH = st.integers(0, 20)


class Model(RuleBasedStateMachine):
    """Requests on a pool, and what is known without it: who holds what, and when each prefix was last in use."""

    @initialize(pages=st.integers(2, 12), reserved=st.integers(0, 1))
    def start(self, pages, reserved):
        self.pool = PagePool(pages, SIZE, reserved)
        self.all = set(range(reserved, pages))
        self.requests = []  # (tokens, pages)
        self.cache = {}  # all tokens up to a page's end: the page
        self.last_use = {}  # the same: when
        self.clock = self.hits = 0

    def holders(self, page):
        return sum(pages.count(page) for _, pages in self.requests)

    def in_use(self, prefix):
        return any(self.holders(page) for p, page in self.cache.items() if p[: len(prefix)] == prefix)

    def idle(self):
        return [prefix for prefix in self.cache if not self.in_use(prefix)]

    def unheld(self):
        """Pages that are neither held nor findable."""
        return {p for p in self.all if not self.holders(p)} - set(self.cache.values())

    def expected(self, tokens):
        pages = []
        for end in range(SIZE, len(tokens), SIZE):
            if tuple(tokens[:end]) not in self.cache:
                break
            pages.append(self.cache[tuple(tokens[:end])])
        return pages

    def took(self, pages, count):
        """Checks new pages, after evicting what had to go for them."""
        free = self.unheld()
        while len(free) < count:
            oldest = min(self.idle(), key=lambda prefix: (self.last_use[prefix], -len(prefix)))
            assert not any(p[: len(oldest)] == oldest and p != oldest for p in self.cache)
            free.add(self.cache.pop(oldest))
        assert len(set(pages)) == len(pages) == count and set(pages) <= free

    @rule(tokens=TOKENS, more=st.integers(0, 2), known=WHICH, shared=st.booleans())
    def admit(self, tokens, more, known, shared):
        if self.cache and known:
            tokens = list(sorted(self.cache)[known % len(self.cache)]) + tokens
        count = -(-len(tokens) // SIZE) + more
        found = self.expected(tokens)
        idle_found = sum(not self.in_use(tuple(tokens[: (i + 1) * SIZE])) for i in range(len(found)))
        enough = count - len(found) <= len(self.unheld()) + len(self.idle()) - idle_found
        result = self.pool.admit(tokens, count)
        self.requests.append((tokens, list(found)))
        self.touch()
        if enough:
            pages, cached = result
            assert pages[: len(found)] == found and cached == SIZE * len(found)
            self.took(pages[len(found) :], count - len(found))
            self.requests[-1] = (tokens, pages)
            self.hits += cached
            if shared:
                self.share(-1, len(tokens))
        else:
            assert result is None
            self.requests.pop()

    @rule(which=WHICH, count=st.integers(0, 4), tokens=TOKENS)
    @precondition(lambda self: self.requests)
    def grow(self, which, count, tokens):
        known, pages = self.requests[which % len(self.requests)]
        enough = count <= len(self.unheld()) + len(self.idle())
        new = self.pool.allocate(count)
        assert (new is not None) == enough
        if enough:
            self.took(new, count)
            pages += new
        known += tokens[: len(pages) * SIZE - len(known)]

    @rule(which=WHICH, committed=st.integers(1, 9))
    @precondition(lambda self: self.requests)
    def share(self, which, committed):
        tokens, pages = self.requests[which % len(self.requests)]
        self.pool.share(tokens[:committed], pages)
        for end in range(SIZE, min(committed, len(tokens)) + 1, SIZE):
            self.cache.setdefault(tuple(tokens[:end]), pages[end // SIZE - 1])

    @rule(which=WHICH, turn=WHICH)
    @precondition(lambda self: self.requests)
    def release_all(self, which, turn):
        _, pages = self.requests.pop(which % len(self.requests))
        turn %= len(pages) + 1
        self.pool.release(pages[turn:] + pages[:turn])

    @rule(which=WHICH, keep=st.integers(0, 5))
    @precondition(lambda self: self.requests)
    def release_end(self, which, keep):
        tokens, pages = self.requests[which % len(self.requests)]
        self.pool.release(pages[keep:])
        del pages[keep:], tokens[keep * SIZE :]

    @rule(tokens=TOKENS)
    def look(self, tokens):
        pages, cached = self.pool.match(tokens)
        assert pages == self.expected(tokens) and cached == SIZE * len(pages) <= max(len(tokens) - 1, 0)
        self.requests.append((tokens, pages))
        self.touch()
        self.requests.pop()
        self.pool.release(pages)

    @invariant()
    def touch(self):
        """Time passes; what is in use is in use now."""
        self.clock += 1
        self.last_use |= {prefix: self.clock for prefix in self.cache if self.in_use(prefix)}

    @invariant()
    def counts_agree(self):
        assert (self.pool.free, self.pool.cached) == (len(self.unheld()), len(self.idle()))
        assert self.pool.used == len(self.all) - len(self.unheld()) - len(self.idle())
        assert self.pool.hits == self.hits

    def teardown(self):
        if hasattr(self, "pool"):
            for _, pages in self.requests:
                self.pool.release(pages)
            assert self.pool.used == 0
            assert set(self.pool.allocate(self.pool.total)) == self.all and self.pool.cached == 0


TestPool = Model.TestCase
# Shrinking takes minutes here: add Phase.shrink to study a failure.
TestPool.settings = settings(max_examples=100, stateful_step_count=30, phases=[Phase.generate])


def test_a_page_is_known_by_its_tokens_and_not_by_their_hash():
    assert hash((-1, 5)) == hash((-2, 5))
    pool = PagePool(4, 2)
    pages = pool.allocate(1)
    pool.share([-1, 5], pages)
    assert pool.match([-2, 5, 0]) == ([], 0)
    assert pool.match([-1, 5, 0]) == (pages, 2)


def test_a_long_chain_shares_and_frees_as_a_short_one():
    pool = PagePool(20_000, 2)
    tokens = list(range(40_000))
    pages = pool.allocate(20_000)
    for end in range(100, 40_001, 100):
        pool.share(tokens[:end], pages)
    pool.release(pages)
    assert pool.cached == 20_000
    assert pool.match(tokens)[1] == 39_998


@pytest.mark.parametrize(("pages", "size", "reserved"), [(1, 16, 1), (0, 16, 0), (4, 0, 0), (4, 16, -1)])
def test_a_pool_without_pages_is_refused(pages, size, reserved):
    with pytest.raises(ValueError, match="expected more pages"):
        PagePool(pages, size, reserved)


def test_a_page_that_is_not_held_cannot_be_released():
    pool = PagePool(3, 2)
    pages = pool.allocate(2)
    pool.share([1, 2, 3, 4], pages)
    pool.release(pages[:1])  # still in use by the page behind it
    with pytest.raises(AssertionError, match="not held"):
        pool.release(pages[:1])


def test_a_duplicate_stays_private_and_what_is_behind_it_is_found():
    pool = PagePool(4, 2)
    first, second = pool.allocate(1), pool.allocate(2)
    pool.share([1, 2], first)
    pool.share([1, 2, 3, 4], second)
    pool.release(second)
    assert (pool.free, pool.cached) == (2, 1)
    assert pool.match([1, 2, 3, 4, 5]) == ([first[0], second[1]], 4)
