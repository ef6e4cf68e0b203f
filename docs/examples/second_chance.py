"""moesim's command line with one more cache policy: second chance, also known as the clock."""

from collections import OrderedDict

from moesim.cli.main import main
from moesim.policies.cache import CACHE_POLICIES


class SecondChance:
    """First in, first out; but one that was used since it entered goes to the end of the queue once."""

    admits = True  # a miss becomes resident

    def __init__(self):
        self.used = OrderedDict()  # the queue of experts: whether each was used since

    def touch(self, key, now, used=True, n_bytes=1):
        self.used[key] = used and key in self.used

    def victim(self, allowed, now=None):
        for _ in range(2 * len(self.used)):
            key, used = next(iter(self.used.items()))
            if allowed(key) and not used:
                return key
            self.used[key] = False
            self.used.move_to_end(key)
        return None

    def remove(self, key):
        del self.used[key]


CACHE_POLICIES["second-chance"] = SecondChance

if __name__ == "__main__":
    main()
