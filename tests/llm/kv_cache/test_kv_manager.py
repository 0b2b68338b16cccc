"""Claim, extend, commit, release: pages, prefix hits and the watermark."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm.kv_cache.manager import KVCacheManager

SIZE = 4


def manager(num_pages: int = 100, *, caching: bool = True) -> KVCacheManager:
    """Return a manager with so many usable pages."""
    return KVCacheManager(num_pages + 1, SIZE, caching)


def prompt(length: int, first: int = 1) -> list[int]:
    return list(range(first, first + length))


def use(kv: KVCacheManager, request_id: str, tokens: list[int], salt: str = "") -> int:
    """Claim and compute a whole prompt; return the number of cached tokens."""
    hits = kv.claim(request_id, tokens, cache_salt=salt)
    assert hits is not None
    kv.commit(request_id, tokens, len(tokens))
    return hits


def test_a_claim_covers_all_tokens_and_a_release_gives_all_back() -> None:
    kv = manager()
    assert kv.claim("a", prompt(10)) == 0
    assert (len(kv.pages("a")), kv.used_pages, kv.has_claim("a")) == (3, 3, True)
    kv.release("a")
    assert (kv.used_pages, kv.num_claims, kv.has_claim("a")) == (0, 0, False)
    kv.check_integrity()


def test_a_prompt_used_again_is_not_computed_again() -> None:
    kv = manager()
    use(kv, "a", prompt(10))
    assert kv.claim("b", [*prompt(9), 99]) == 8
    assert list(kv.pages("b"))[:2] == list(kv.pages("a"))[:2]
    assert (kv.used_pages, kv.prefix_hit_tokens, kv.prefix_miss_tokens) == (4, 8, 12)
    kv.check_integrity()


@pytest.mark.parametrize(("length", "hits"), [(8, 4), (9, 8), (4, 0), (5, 4), (1, 0)])
def test_at_least_one_token_is_left_to_compute(length: int, hits: int) -> None:
    kv = manager()
    use(kv, "a", prompt(length))
    assert kv.claim("b", prompt(length)) == hits
    kv.check_integrity()


def test_released_pages_stay_cached_until_the_room_is_needed() -> None:
    kv = manager(4)
    use(kv, "a", prompt(12))
    kv.release("a")
    assert (kv.used_pages, kv.cached_pages, kv.available_pages) == (0, 3, 4)
    assert kv.claim("b", prompt(16, first=50)) == 0
    assert (kv.used_pages, kv.cached_pages) == (4, 0)
    kv.release("b")
    assert kv.claim("c", prompt(12)) == 0
    kv.check_integrity()


def test_a_salt_has_a_cache_of_its_own() -> None:
    kv = manager()
    use(kv, "a", prompt(10), "adapter 1")
    assert use(kv, "b", prompt(10), "adapter 2") == 0
    assert use(kv, "c", prompt(10), "adapter 1") == 8
    kv.check_integrity()


def test_without_caching_nothing_is_kept() -> None:
    kv = manager(caching=False)
    use(kv, "a", prompt(10))
    assert use(kv, "b", prompt(10)) == 0
    kv.release("a")
    kv.release("b")
    assert (kv.cached_pages, kv.prefix_hit_tokens) == (0, 0)
    kv.check_integrity()


def test_a_claim_need_not_read_the_cache() -> None:
    kv = manager()
    use(kv, "a", prompt(10))
    assert kv.claim("b", prompt(10), reads_cache=False) == 0
    assert not set(kv.pages("a")) & set(kv.pages("b"))
    kv.check_integrity()


def test_tokens_without_kv_are_not_committed() -> None:
    kv = manager()
    kv.claim("a", prompt(8))
    kv.commit("a", prompt(8), 7)  # the eighth was just sampled
    assert kv.claim("b", prompt(9)) == 4
    with pytest.raises(ValueError, match="9 computed of 8 tokens"):
        kv.commit("a", prompt(8), 9)
    kv.check_integrity()


def test_two_that_computed_the_same_keep_their_page_tables() -> None:
    kv = manager()
    kv.claim("a", prompt(9))
    kv.claim("b", prompt(9))
    before = list(kv.pages("b"))
    kv.commit("a", prompt(9), 9)
    kv.commit("b", prompt(9), 9)
    assert list(kv.pages("b")) == before
    assert not set(kv.pages("a")) & set(before)
    assert kv.claim("c", prompt(9)) == 8
    assert list(kv.pages("c"))[:2] == list(kv.pages("a"))[:2]
    for request_id in "abc":
        kv.release(request_id)
        kv.check_integrity()
    assert (kv.used_pages, kv.cached_pages) == (0, 2)


def test_a_copy_of_a_cached_prefix_keeps_only_itself_alive() -> None:
    kv = manager(4)
    for request_id in "ab":
        kv.claim(request_id, prompt(8))
    use_again = prompt(8)
    kv.commit("a", use_again, 8)
    kv.commit("b", use_again, 8)
    kv.release("a")
    assert kv.extend("b", 16), "what a left in the cache can be evicted for b"
    kv.check_integrity()


def test_pages_after_a_copied_prefix_are_cached_at_the_release() -> None:
    kv = manager()
    kv.claim("a", prompt(8))
    kv.claim("b", prompt(16))
    kv.commit("a", prompt(8), 8)
    kv.commit("b", prompt(16), 16)
    assert kv.cached_pages == 0
    kv.release("b", prompt(16), 16)
    kv.check_integrity()
    assert kv.claim("c", prompt(17)) == 16


def test_extend_grows_the_live_page_table_or_changes_nothing() -> None:
    kv = manager(3)
    kv.claim("a", prompt(4))
    table = kv.pages("a")
    assert kv.extend("a", 5)
    assert kv.extend("a", 8)
    assert len(table) == 2
    assert not kv.extend("a", 13)
    assert (len(table), kv.used_pages) == (2, 2)
    kv.check_integrity()


@pytest.mark.parametrize(("needed", "admitted"), [(15, True), (16, False)])
def test_the_watermark_example(needed: int, admitted: bool) -> None:
    """100 pages, 80 used, watermark 0.95."""
    kv = manager(100)
    kv.claim("running", prompt(80 * SIZE))
    assert kv.room(0.95) == 15
    hits = kv.claim("new", prompt(needed * SIZE, first=5000), watermark=0.95)
    assert (hits is not None) == admitted
    assert kv.used_pages == (80 + needed if admitted else 80)


def test_prefix_hits_in_use_do_not_count_against_the_watermark() -> None:
    kv = manager(10)
    use(kv, "a", prompt(33))  # 9 pages
    assert kv.claim("b", prompt(40, first=500), watermark=0.95) is None
    assert kv.claim("c", [*prompt(32), 7], watermark=0.95) is None  # a tenth page
    assert kv.claim("c", [*prompt(32), 7], watermark=1.0) == 32


def test_cached_pages_that_a_claim_revives_do_count() -> None:
    kv = manager(10)
    use(kv, "a", prompt(33))
    kv.release("a")
    assert kv.used_pages == 0
    assert kv.claim("b", prompt(33), watermark=0.8) is None
    assert kv.claim("b", prompt(33), watermark=0.9) == 32
    kv.check_integrity()


def test_revived_and_new_pages_count_together() -> None:
    kv = manager(3)
    use(kv, "a", prompt(4))
    kv.release("a")
    kv.claim("b", prompt(8, first=50))
    assert (kv.room(), kv.cached_pages) == (1, 1)
    assert kv.claim("c", prompt(8)) is None  # the cached page and a new one
    kv.check_integrity()


def test_room_is_the_whole_pool_unless_a_share_is_given() -> None:
    kv = manager(10)
    kv.claim("a", prompt(12))
    assert (kv.room(), kv.room(0.5), kv.room(0.2)) == (7, 2, -1)


def test_a_release_caches_what_was_computed_after_the_last_commit() -> None:
    kv = manager()
    kv.claim("a", prompt(13))
    kv.commit("a", prompt(13), 8)
    kv.release("a", prompt(13), 13)
    kv.check_integrity()
    assert kv.claim("b", prompt(13)) == 12


def test_a_release_without_tokens_caches_nothing_even_of_pages_of_one_token() -> None:
    kv = KVCacheManager(5, 1)
    kv.claim("a", [7, 8])
    kv.release("a")
    assert kv.cached_pages == 0
    kv.check_integrity()


def test_a_claim_can_be_renamed() -> None:
    kv = manager()
    kv.claim("a", prompt(8))
    pages = list(kv.pages("a"))
    kv.claim("b", prompt(4, first=50))
    with pytest.raises(ValueError, match="request b has a claim already"):
        kv.rename("a", "b")
    kv.rename("a", "c")
    assert (kv.has_claim("a"), list(kv.pages("c")), kv.num_claims) == (False, pages, 2)
    kv.check_integrity()


def test_a_claim_that_does_not_fit_changes_nothing() -> None:
    kv = manager(4)
    use(kv, "a", prompt(9))
    state = repr(kv)
    assert kv.claim("b", prompt(12, first=50)) is None
    assert repr(kv) == state == "KVCacheManager(1 requests hold 3 of 4 pages, 0 cached)"
    kv.check_integrity()


def test_claiming_or_releasing_twice_is_an_error() -> None:
    kv = manager()
    kv.claim("a", prompt(4))
    with pytest.raises(ValueError, match="has a claim already"):
        kv.claim("a", prompt(4))
    kv.release("a")
    with pytest.raises(ValueError, match="has no claim"):
        kv.release("a")


def test_check_integrity_finds_a_page_in_two_places() -> None:
    kv = manager()
    kv.claim("a", prompt(8))
    pages = kv.pages("a")
    assert isinstance(pages, array)
    pages[1] = pages[0]
    with pytest.raises(AssertionError, match="holds a page twice"):
        kv.check_integrity()


class ManagerMachine(RuleBasedStateMachine):
    """Requests arrive, grow and end at random; slots remember the tokens written to them."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = manager(12)
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.slots: dict[int, int] = {}
        self.serial = 0

    def _slot(self, request_id: str, position: int) -> int:
        return self.kv.pages(request_id)[position // SIZE] * SIZE + position % SIZE

    @rule(
        tokens=st.lists(st.integers(1, 2), min_size=1, max_size=20),
        watermark=st.sampled_from([0.5, 0.95, 1.0]),
    )
    def claim(self, tokens: list[int], watermark: float) -> None:
        self.serial += 1
        request_id = str(self.serial)
        hits = self.kv.claim(request_id, tokens, watermark=watermark)
        if hits is None:
            assert self.kv.pages_for(len(tokens)) > int(watermark * 12) - self.kv.used_pages
            return
        assert hits < len(tokens)
        self.tokens[request_id], self.computed[request_id] = list(tokens), hits

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens, start = self.tokens[request_id], self.computed[request_id]
        end = min(start + count, len(tokens))
        for position in range(start, end):
            self.slots[self._slot(request_id, position)] = tokens[position]
        self.computed[request_id] = end
        self.kv.commit(request_id, tokens, end)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), token=st.integers(1, 2))
    def grow(self, data: st.DataObject, token: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        if self.kv.extend(request_id, len(self.tokens[request_id]) + 1):
            self.tokens[request_id].append(token)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[request_id], self.computed[request_id]
        self.kv.release(request_id)

    @invariant()
    def every_claim_reads_its_own_tokens(self) -> None:
        for request_id, tokens in self.tokens.items():
            known = range(self.computed[request_id])
            assert [self.slots[self._slot(request_id, p)] for p in known] == tokens[: len(known)]

    @invariant()
    def everything_adds_up(self) -> None:
        self.kv.check_integrity()
        assert 0 <= self.kv.used_pages <= self.kv.total_pages == 12
        if not self.tokens:
            assert self.kv.used_pages == 0


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=40, stateful_step_count=40)
