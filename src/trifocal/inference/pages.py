"""Which page of the caches belongs to which sequence: the host's side of them, plain numbers without tensors.

A page holds a fixed number of tokens of every layer. A sequence owns a list of pages; a fork shares them. A page that
several sequences own is never written: whoever writes into it first gets its own copy.
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfPages(Exception):
    """Fewer pages are free than are needed; nothing was taken."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed:,} pages are needed and {free:,} are free")


class PageAllocator:
    """Free pages of `page_size` tokens, and how many sequences own each of the others."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        # A stack: the page freed last is reused first, while it is still in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def pages_of(self, num_tokens: int) -> int:
        """Number of pages that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Own `count` free pages; OutOfPages if there are fewer."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to pages that have one."""
        for page in pages:
            assert self._owners[page] > 0, page
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take an owner away; a page without owners is free."""
        for page in pages:
            assert self._owners[page] > 0, page
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def owners(self, page: int) -> int:
        """How many sequences own a page."""
        return self._owners[page]


class PageTable:
    """The pages of one sequence, first to last: token `t` of its `length` lies in `pages[t // page_size]`."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self.pages: list[int] = []
        self.length = 0

    def missing(self, num_new: int) -> int:
        """Pages that `grow` would take."""
        return self._taken(num_new, self.shared_page(num_new))

    def _taken(self, num_new: int, shared: int | None) -> int:
        """Pages for new tokens, with one for the copy of a shared page that they would be written into."""
        return self._allocator.pages_of(self.length + num_new) - len(self.pages) + (shared is not None)

    def grow(self, num_new: int) -> list[tuple[int, int]]:
        """Make room for new tokens; OutOfPages leaves the table as before. Returns the pages to copy before the tokens
        are written, as (from, to): the last page, if it has other owners.
        """
        shared, copies = self.shared_page(num_new), []
        count = self._taken(num_new, shared)
        # Most tokens of decoding need no page.
        taken = self._allocator.take(count) if count else []
        if shared is not None:
            copies = [(shared, taken[0])]
            self._allocator.release([shared])
            self.pages[-1] = taken.pop(0)
        self.pages += taken
        self.length += num_new
        return copies

    def shrink(self, count: int) -> None:
        """Take the last tokens back, as if they had not been."""
        assert 0 <= count <= self.length, (count, self.length)
        self.length -= count
        kept = self._allocator.pages_of(self.length)
        self._allocator.release(self.pages[kept:])
        del self.pages[kept:]

    def fork(self) -> "PageTable":
        """Another sequence with the same tokens; it owns the same pages, and takes none."""
        other = PageTable(self._allocator)
        other.pages, other.length = list(self.pages), self.length
        self._allocator.share(self.pages)
        return other

    def free(self) -> None:
        """Give all pages back; the table is empty."""
        self._allocator.release(self.pages)
        self.pages, self.length = [], 0

    def shared_page(self, num_new: int) -> int | None:
        """The page that new tokens would be written into although others own it too."""
        begun = num_new and self.length % self._allocator.page_size
        return self.pages[-1] if begun and self._allocator.owners(self.pages[-1]) > 1 else None


def pages_for_one_more(allocator: PageAllocator, tables: Iterable[PageTable]) -> int:
    """Pages that are taken when each of these grows by one token, one after another."""
    needed, writers = 0, Counter[int]()
    for table in tables:
        page = table.shared_page(1)
        needed += table._taken(1, page)
        if page is not None:
            writers[page] += 1
    # If all owners of a page copy it, the last of them is the only one left, and does not.
    return needed - sum(count == allocator.owners(page) for page, count in writers.items())
