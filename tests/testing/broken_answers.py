"""Backends that break the clauses on answers, on the leading run, and on keys and namespaces."""

from testing.breaking import breaks

from hicache_storage import Store, hookimpl
from hicache_storage.middleware.around import Around

# -- 1 answers -----------------------------------------------------------------------------------


@breaks("1.1")
class AnswersInOrderOfWork(Around):
    """Sorts the keys to work on them, and forgets to sort back."""

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        order = sorted(range(len(keys)), key=lambda i: keys[i])
        sorted_keys = [keys[i] for i in order]
        return self.inner.batch_get(sorted_keys, [buffers[i] for i in order], prefix_keys)


class _AsksForNothing(Store):
    def batch_set(self, namespace, keys, pages, prefix_keys=None):
        if not keys:
            return self._caller.batch_set([], [], None)
        return super().batch_set(namespace, keys, pages, prefix_keys)


@breaks("1.2")
class EmptyBatchesGoIn(Around):
    store_class = _AsksForNothing


@breaks("1.3")
class MissSpoilsTheBatch(Around):
    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = self.inner.batch_get(keys, buffers, prefix_keys)
        return hits if all(hits) else [False] * len(hits)


@breaks("1.3")
class MissRaises(Around):
    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = self.inner.batch_get(keys, buffers, prefix_keys)
        if not any(hits):
            raise KeyError(keys[0])
        return hits


@breaks("1.4")
class ForgetsBeyond128(Around):
    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        hits = self.inner.batch_get(keys[:128], buffers[:128], prefix_keys)
        return hits + [False] * (len(keys) - 128)


@breaks("1.5")
class AnswersByKey(Around):
    """Gathers the batch in a dict, so that equal keys become one."""

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        by_key = dict(zip(keys, buffers, strict=True))
        hits = self.inner.batch_get(list(by_key), list(by_key.values()), prefix_keys)
        found = dict(zip(by_key, hits, strict=True))
        return [found[key] for key in keys]


@breaks("1.6")
class PlacesByPrefix(Around):
    """Puts a page where its prefix says, and looks for it there alone."""

    def _placed(self, keys, prefix_keys):
        if not prefix_keys:
            return keys
        tail = prefix_keys[-1][-8:]
        return [key[:-8] + tail for key in keys]

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        return self.inner.batch_set(self._placed(keys, prefix_keys), pages, prefix_keys)

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        return self.inner.batch_get(self._placed(keys, prefix_keys), buffers, prefix_keys)


@breaks("1.7")
class AnswersWithTuples(Around):
    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        return tuple(self.inner.batch_get(keys, buffers, prefix_keys))


@breaks("1.7")
class AnswersWithNone(Around):
    @hookimpl
    def exists(self, keys, prefix_keys):
        return self.inner.exists(keys, prefix_keys) or None


@breaks("1.8")
class SortsTheCallersKeys(Around):
    @hookimpl
    def exists(self, keys, prefix_keys):
        run = self.inner.exists(keys, prefix_keys)
        keys.sort()
        return run


@breaks("1.8")
class EatsTheCallersKeys(Around):
    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        answers = []
        while keys:
            answers += self.inner.batch_set([keys.pop(0)], [pages.pop(0)], prefix_keys)
        return answers


# -- 3 the leading run ---------------------------------------------------------------------------


@breaks("3.1")
class CountsWhatIsThere(Around):
    @hookimpl
    def exists(self, keys, prefix_keys):
        return sum(self.inner.exists([key], None) for key in keys)


@breaks("3.2")
class BelievesTheLastKey(Around):
    """If the last page is there, all before it must be."""

    @hookimpl
    def exists(self, keys, prefix_keys):
        if self.inner.exists(keys[-1:], None) and self.inner.exists(keys[:1], None):
            return len(keys)
        return self.inner.exists(keys, prefix_keys)


@breaks("3.3")
class RemembersMisses(Around):
    def __init__(self, inner):
        super().__init__(inner)
        self.missing = set()

    @hookimpl
    def exists(self, keys, prefix_keys):
        run = self.inner.exists(keys, prefix_keys)
        run = next((i for i, key in enumerate(keys[:run]) if key in self.missing), run)
        self.missing.update(keys[run : run + 1])
        return run


@breaks("3.4")
class LooksInOneNamespace(Around):
    """All keys of a call are taken to be of the first one's."""

    @hookimpl
    def exists(self, keys, prefix_keys):
        space = keys[0].partition("/")[0]
        return self.inner.exists([f"{space}/{key.partition('/')[2]}" for key in keys], None)


# -- 6 keys and namespaces -----------------------------------------------------------------------


class _RenamesKeys(Around):
    def rename(self, key):
        raise NotImplementedError

    @hookimpl
    def batch_set(self, keys, pages, prefix_keys):
        return self.inner.batch_set([self.rename(key) for key in keys], pages, None)

    @hookimpl
    def batch_get(self, keys, buffers, prefix_keys):
        return self.inner.batch_get([self.rename(key) for key in keys], buffers, None)

    @hookimpl
    def exists(self, keys, prefix_keys):
        return self.inner.exists([self.rename(key) for key in keys], None)

    @hookimpl
    def delete(self, keys):
        return self.inner.delete([self.rename(key) for key in keys])


@breaks("6.1")
class DropsTheTag(_RenamesKeys):
    def rename(self, key):
        space, _, name = key.partition("/")
        return f"{space}/{name.rpartition(':')[2]}"


@breaks("6.2", "6.3")
class DropsTheNamespace(_RenamesKeys):
    def rename(self, key):
        return "0" * 32 + "/" + key.partition("/")[2]


@breaks("6.3")
class ShortensKeys(_RenamesKeys):
    def rename(self, key):
        return key[: 32 + 1 + 63]
