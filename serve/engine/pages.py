"""Pages of the KV cache: who holds which, and which hold the beginning of a prompt that comes again."""

from collections import OrderedDict
from collections.abc import Sequence

ROOT = -1
"""What stands before a first page."""

PRIVATE = (ROOT, ())
"""Key of a page that cannot be found."""


class PagePool:
    """Page numbers, handed out, shared by requests with the same beginning, and taken back.

    A page holds the KV entries of `page_size` positions, the target's and the drafter's alike. A full page can be made
    findable: by its tokens and the findable page before it, so by all tokens from the start, compared and not only
    hashed. A page is in use while a request holds it or a findable page behind it is in use. One that is out of use is
    free at once, or stays findable (`cached`) until its space is needed. The least recently used goes first; since a
    page is in use for as long as those behind it, none goes before them, and no findable page is out of reach.

    Every call takes O(1) for each page it is given or gives. Not safe between threads.
    """

    def __init__(self, pages: int, page_size: int, reserved: int = 0):
        """Numbers `reserved` to `pages - 1` are handed out; those before are the caller's, as for padding's writes.

        Raises:
          ValueError: no page to hand out, or pages of no positions.
        """
        if not 0 <= reserved < pages or page_size < 1:
            raise ValueError(
                f"expected more pages than reserved ones, and 1 or more positions a page; got {pages} pages,"
                f" {reserved} of them reserved, of {page_size} positions."
            )
        self.page_size = page_size
        self.total = pages - reserved
        self.hits = 0
        self._free = list(range(pages - 1, reserved - 1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # out of use, least recently used first
        self._holders = [0] * pages
        self._users = [0] * pages  # holders, and findable pages behind it that are in use
        self._keys: list[tuple[int, tuple[int, ...]]] = [PRIVATE] * pages  # findable page before it, its tokens
        self._findable: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def free(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages out of use that can be found, or taken."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """All others."""
        return self.total - self.free - self.cached

    def admit(self, tokens: Sequence[int], count: int) -> tuple[list[int], int] | None:
        """Pages of a request: those that `match` finds, and new ones, `count` together; or None, and nothing changes.

        Adds to `hits`, the tokens served from the cache. None is no worse than before, except that the pages found
        count as used just now.
        """
        pages, cached = self.match(tokens)
        rest = self.allocate(count - len(pages))
        if rest is None:
            self.release(pages)
            return None
        self.hits += cached
        return pages + rest, cached

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Takes hold of the findable pages that these tokens begin with.

        Returns:
          Page numbers in order and how many tokens they hold, at most all but one: the last is left to compute.
        """
        pages: list[int] = []
        for i in range((len(tokens) - 1) // self.page_size):
            page = self._findable.get((pages[-1] if pages else ROOT, self._content(tokens, i)))
            if page is None:
                break
            self._holders[page] += 1
            self._enter_use(page)
            pages.append(page)
        return pages, len(pages) * self.page_size

    def allocate(self, count: int) -> list[int] | None:
        """Takes hold of pages of undefined content, evicting cached ones for them; None if there are not so many."""
        assert count >= 0
        if count > self.free + self.cached:
            return None
        while self.free < count:
            page, _ = self._cached.popitem(last=False)
            del self._findable[self._keys[page]]
            self._keys[page] = PRIVATE
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = self._users[page] = 1
        return pages

    def share(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Makes the full pages of a request findable; later calls add those that are full by then.

        A page whose content is findable under another number stays private to its holders, and the pages behind it are
        findable behind that other one.

        Args:
          tokens: from the first position on; what is written is never written again, so committed ones, whose KV
            entries the target and the drafter have written or will before anything that is dispatched later.
          pages: that hold them, in order, all held by the caller.
        """
        full = len(tokens) // self.page_size
        assert full <= len(pages)
        start = next((i for i in range(full, 0, -1) if self._keys[pages[i - 1]] != PRIVATE), 0)
        parent = pages[start - 1] if start else ROOT
        for i in range(start, full):
            page, key = pages[i], (parent, self._content(tokens, i))
            assert self._holders[page]
            parent = self._findable.setdefault(key, page)
            if parent == page:
                self._keys[page] = key
                self._enter_use(key[0])

    def release(self, pages: Sequence[int]) -> None:
        """Lets go of pages, one hold each, in any order."""
        for page in pages:
            assert self._holders[page], f"page {page} is not held"
            self._holders[page] -= 1
            self._leave_use(page)

    def _content(self, tokens: Sequence[int], i: int) -> tuple[int, ...]:
        return tuple(tokens[i * self.page_size : (i + 1) * self.page_size])

    def _enter_use(self, page: int) -> None:
        """Counts a user of a findable page, and of those before it that come into use by that."""
        while page != ROOT:
            self._users[page] += 1
            if self._users[page] > 1:
                return
            del self._cached[page]
            page = self._keys[page][0]

    def _leave_use(self, page: int) -> None:
        """Takes a user of a page away, and of those before it that go out of use by that."""
        while page != ROOT:
            self._users[page] -= 1
            if self._users[page]:
                return
            if self._keys[page] == PRIVATE:
                self._free.append(page)
            else:
                self._cached[page] = None
            page = self._keys[page][0]
