"""The allocator of pages: what is taken, shared, copied on write and given back."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trifocal.inference.pages import OutOfPages, PageAllocator, PageTable, pages_for_one_more


class Model(RuleBasedStateMachine):
    """Sequences of written numbers, kept once in pages with copies as told, once as plain lists."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(7, 4)
        self.memory = {page: [-1] * 4 for page in range(7)}
        self.tables = []
        self.expected = []
        self.written = 0

    @rule()
    def admit(self):
        self.tables.append(PageTable(self.allocator))
        self.expected.append([])

    @rule(which=st.integers(0, 9), count=st.integers(0, 9))
    def grow(self, which, count):
        if not self.tables:
            return
        table, expected = self.tables[which % len(self.tables)], self.expected[which % len(self.tables)]
        free, before, missing = self.allocator.num_free, list(table.pages), table.missing(count)
        try:
            copies = table.grow(count)
        except OutOfPages:
            assert missing > free and table.pages == before and self.allocator.num_free == free
            return
        assert missing <= free and self.allocator.num_free == free - missing
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for position in range(len(expected), len(expected) + count):
            self.written += 1
            self.memory[table.pages[position // 4]][position % 4] = self.written
            expected.append(self.written)

    @rule(which=st.integers(0, 9), count=st.integers(0, 9))
    def shrink(self, which, count):
        if self.tables:
            table, expected = self.tables[which % len(self.tables)], self.expected[which % len(self.tables)]
            count = min(count, table.length)
            table.shrink(count)
            del expected[len(expected) - count :]

    @rule(some=st.sets(st.integers(0, 9)))
    def grow_some_by_one(self, some):
        chosen = [i for i in range(len(self.tables)) if i in some]
        free = self.allocator.num_free
        needed = pages_for_one_more(self.allocator, [self.tables[i] for i in chosen])
        if needed <= free:
            for i in chosen:
                self.grow(i, 1)
            assert self.allocator.num_free == free - needed

    @rule(which=st.integers(0, 9))
    def fork(self, which):
        if self.tables:
            self.tables.append(self.tables[which % len(self.tables)].fork())
            self.expected.append(list(self.expected[which % len(self.expected)]))

    @rule(which=st.integers(0, 9))
    def free(self, which):
        if self.tables:
            self.tables.pop(which % len(self.tables)).free()
            self.expected.pop(which % len(self.expected))

    @invariant()
    def every_sequence_reads_what_it_wrote(self):
        for table, expected in zip(self.tables, self.expected, strict=True):
            assert table.length == len(expected)
            found = [self.memory[table.pages[t // 4]][t % 4] for t in range(table.length)]
            assert found == expected

    @invariant()
    def no_page_is_lost(self):
        owned = {page for table in self.tables for page in table.pages}
        assert self.allocator.num_free == 7 - len(owned)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
