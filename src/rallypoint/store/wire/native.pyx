# cython: language_level=3, binding=False, boundscheck=False, wraparound=False
"""The hot requests, and the blobs of long ones, read without an object for each step.

The parser asks here first, where this has been compiled. What is not one of these requests, or is not there
whole, or is longer than its limit, is left to the parser. Nothing is carried out here: whoever has read a
request, it goes to the same method of the handler, with the same arguments. Only a row of the same ADDs goes
to a method of its own, `add_times`, if that says that it comes to the same.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcmp

from rallypoint.errors import ProtocolError
from rallypoint.store.wire.opcodes import Op

cdef int SET = Op.SET
cdef int GET = Op.GET
cdef int ADD = Op.ADD
cdef int CHECK = Op.CHECK
cdef int PING = Op.PING


cdef inline uint64_t number_at(const unsigned char* at) noexcept:
    # Byte by byte, for every machine. A compiler makes one load of it where that is the same.
    return (
        <uint64_t>at[0] | <uint64_t>at[1] << 8 | <uint64_t>at[2] << 16 | <uint64_t>at[3] << 24
        | <uint64_t>at[4] << 32 | <uint64_t>at[5] << 40 | <uint64_t>at[6] << 48 | <uint64_t>at[7] << 56
    )


cdef inline void put_number(unsigned char* to, uint64_t number) noexcept:
    cdef int index
    for index in range(8):
        to[index] = <unsigned char>(number >> 8 * index)


def pack_i64(int64_t number):
    """As `Struct("<q").pack` does with a number in its range."""
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, 8)
    put_number(<unsigned char*>PyBytes_AS_STRING(packed), <uint64_t>number)
    return packed


cdef bytes pack_sums(int64_t last, int64_t amount, Py_ssize_t count):
    """The sums of as many additions of `amount` as led to the last one."""
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, 8 * count)
    cdef unsigned char* to = <unsigned char*>PyBytes_AS_STRING(packed)
    cdef uint64_t total = <uint64_t>last
    while count:
        count -= 1
        put_number(to + 8 * count, total)
        total -= <uint64_t>amount
    return packed


cdef inline bytes cut(const unsigned char* start, Py_ssize_t begin, Py_ssize_t stop):
    return PyBytes_FromStringAndSize(<const char*>start + begin, stop - begin)


def cut_blobs(
    bytes data not None,
    Py_ssize_t position,
    list blobs not None,
    Py_ssize_t left,
    tuple caps not None,
    Py_ssize_t most,
):
    """Append to `blobs` the next ones of a request, of which `left` are missing; return where the rest begins.

    Stops before a blob that is not whole, or breaks its limit of `caps`, or ends behind `most`.
    """
    cdef Py_ssize_t end = min(PyBytes_GET_SIZE(data), most), period = len(caps)
    cdef const unsigned char* start = <const unsigned char*>PyBytes_AS_STRING(data)
    cdef Py_ssize_t index = (period - left % period) % period
    cdef uint64_t length
    while left and end - position >= 8:
        length = number_at(start + position)
        if length > <uint64_t>(end - position - 8) or length > <uint64_t>caps[index]:
            break
        position += 8
        blobs.append(cut(start, position, position + <Py_ssize_t>length))
        position += <Py_ssize_t>length
        left -= 1
        index += 1
        if index == period:
            index = 0
    return position


cdef Py_ssize_t same_ones(
    const unsigned char* start, Py_ssize_t begin, Py_ssize_t stop, Py_ssize_t end, Py_ssize_t pause
) noexcept:
    """How many requests are the same, byte for byte, one behind the other, before `pause`."""
    cdef Py_ssize_t size = stop - begin, count = 1
    while stop < pause and end - stop >= size and not memcmp(start + begin, start + stop, size):
        count += 1
        stop += size
    return count


cdef enum:
    SLOTS = 1 << 10
    LONGEST_KNOWN = 128

cdef uint64_t MIXER = 0x9E3779B97F4A7C15  # odd, and half of its bits are set


cdef class Keys:
    """The keys that came last, to be the same objects again: what a dict has, it then finds without comparing."""

    cdef list _known

    def __init__(self):
        self._known = [None] * SLOTS

    cdef bytes cut(self, const unsigned char* start, Py_ssize_t begin, Py_ssize_t stop):
        """The key that is there."""
        cdef Py_ssize_t size = stop - begin, at = begin
        cdef uint64_t mixed = <uint64_t>size, word
        cdef bytes key
        cdef Py_ssize_t slot
        if not 8 <= size <= LONGEST_KNOWN:
            return cut(start, begin, stop)
        while True:
            word = number_at(start + min(at, stop - 8))
            mixed = (mixed ^ word) * MIXER
            mixed ^= mixed >> 32
            at += 8
            if at >= stop:
                break
        slot = <Py_ssize_t>(mixed * MIXER >> 54)  # the highest bits depend on all others
        known = self._known[slot]
        if known is not None:
            key = <bytes>known
            if PyBytes_GET_SIZE(key) == size and not memcmp(PyBytes_AS_STRING(key), start + begin, size):
                return key
        key = cut(start, begin, stop)
        self._known[slot] = key
        return key


cdef class Hot:
    """GET, SET, ADD, CHECK of one key, and PING, for all connections of a server: limits, and how many there were."""

    cdef object _kind, _get, _set, _add, _add_times, _check, _ping  # a class of handlers, and its methods
    cdef Keys _keys
    cdef uint64_t _key_bytes, _value_bytes, _request_bytes
    cdef Py_ssize_t _large
    cdef readonly int64_t sets, adds, checks, pings
    cdef readonly Py_ssize_t carried

    def __init__(self, limits, Py_ssize_t large_reply):
        """`large_reply`: from so many bytes on, a reply is large."""
        self._keys = Keys()
        self._key_bytes = limits.key_bytes
        self._value_bytes = limits.value_bytes
        self._request_bytes = limits.request_bytes
        self._large = large_reply

    def serve_one(self, handler, bytes data not None):
        """Have the handler carry out the one request that `data` is, and return the reply; None if it is not.

        There may be a SET before it, as no client waits for a reply to that. `carried` says how many requests there
        were. One that the handler refuses is among them, unless it is a GET.
        """
        cdef Py_ssize_t end = PyBytes_GET_SIZE(data), first
        cdef const unsigned char* start = <const unsigned char*>PyBytes_AS_STRING(data)
        cdef bytes woken, reply
        self.carried = 0
        first = self._end_of(start, 0, end) if end else 0
        if not first:
            return None
        if first == end:
            self.carried = start[0] != GET
            reply = self._hand_over(handler, start, 0, end)
            self.carried = 1
            return reply
        if start[0] != SET or self._end_of(start, first, end) != end:
            return None
        self.carried = 1
        woken = self._hand_over(handler, start, 0, first)
        self.carried += start[first] != GET
        try:
            reply = self._hand_over(handler, start, first, end)
        except ProtocolError as error:
            error.replies = woken + error.replies
            raise
        self.carried = 2
        return woken + reply

    def serve(self, handler, bytes data not None, Py_ssize_t position, Py_ssize_t pause, list replies not None):
        """Have the handler carry out the requests that begin at `position` and before `pause`.

        Returns where the first one begins that it has not carried out, and how many of the replies are not to a
        GET. `carried` says how many requests were no GETs, even if the handler raises. Stops behind a large reply.
        """
        cdef Py_ssize_t end = PyBytes_GET_SIZE(data), stop, times, alone = 0, others = 0
        cdef const unsigned char* start = <const unsigned char*>PyBytes_AS_STRING(data)
        cdef bytes reply
        cdef bint is_get
        self.carried = 0
        while position < pause:
            stop = self._end_of(start, position, end)
            if not stop:
                break
            is_get = start[position] == GET
            reply = None
            if start[position] == ADD and position >= alone:
                times = same_ones(start, position, stop, end, pause)
                if times > 1:
                    reply = self._hand_over_all(handler, start, position, stop, times)
                    if reply is None:
                        alone = position + times * (stop - position)
                    else:
                        self.carried += times
                        stop = position + times * (stop - position)
            if reply is None:
                self.carried += not is_get
                reply = self._hand_over(handler, start, position, stop)
            if is_get:
                replies.append(reply)
                if PyBytes_GET_SIZE(reply) >= self._large:
                    pause = stop
            elif PyBytes_GET_SIZE(reply):
                replies.append(reply)
                others += 1
            position = stop
        return position, others

    cdef Py_ssize_t _end_of(self, const unsigned char* start, Py_ssize_t begin, Py_ssize_t end) noexcept:
        """Where the request ends that begins there; 0 if it is none of these, is not whole, or breaks a limit."""
        cdef Py_ssize_t stop = begin + 9
        cdef uint64_t length, value
        cdef int op = start[begin]
        if op == PING:
            stop = begin + 5
            return stop if stop <= end and 5 <= self._request_bytes else 0
        if stop > end:
            return 0
        length = number_at(start + begin + 1)
        if op == CHECK:
            if length != 1 or stop + 8 > end:
                return 0
            length = number_at(start + stop)
            stop += 8
        elif op != GET and op != ADD and op != SET:
            return 0
        if length > <uint64_t>(end - stop) or length > self._key_bytes:
            return 0
        stop += <Py_ssize_t>length
        if op == ADD or op == SET:
            if end - stop < 8:
                return 0
            if op == SET:
                value = number_at(start + stop)
                if value > <uint64_t>(end - stop - 8) or value > self._value_bytes:
                    return 0
                stop += <Py_ssize_t>value
            stop += 8
        return stop if <uint64_t>(stop - begin) <= self._request_bytes else 0

    cdef void _meet(self, kind):
        self._get, self._set, self._check = kind.get, kind.set, kind.check
        self._add, self._add_times, self._ping = kind.add, kind.add_times, kind.ping
        self._kind = kind

    cdef bytes _hand_over_all(
        self, handler, const unsigned char* start, Py_ssize_t begin, Py_ssize_t stop, Py_ssize_t times
    ):
        """The replies to an ADD that is there so many times; None if each has to be handed over by itself."""
        if self._kind is not type(handler):
            self._meet(type(handler))
        cdef int64_t amount = <int64_t>number_at(start + stop - 8)
        total = self._add_times(handler, self._keys.cut(start, begin + 9, stop - 8), amount, times)
        if total is None:
            return None
        self.adds += times
        return pack_sums(total, amount, times)

    cdef bytes _hand_over(self, handler, const unsigned char* start, Py_ssize_t begin, Py_ssize_t stop):
        """The handler's reply to the request that is there. One that it refuses counts as well."""
        if self._kind is not type(handler):  # to look them up for each request takes longer
            self._meet(type(handler))
        cdef int op = start[begin]
        cdef Py_ssize_t key
        cdef bytes reply
        if op == GET:
            reply = self._get(handler, self._keys.cut(start, begin + 9, stop))
        elif op == ADD:
            self.adds += 1
            reply = self._add(handler, self._keys.cut(start, begin + 9, stop - 8), <int64_t>number_at(start + stop - 8))
        elif op == CHECK:
            self.checks += 1
            reply = self._check(handler, [self._keys.cut(start, begin + 17, stop)])
        elif op == PING:
            self.pings += 1
            reply = self._ping(handler, cut(start, begin + 1, stop))
        else:
            key = begin + 9 + <Py_ssize_t>number_at(start + begin + 1)
            self.sets += 1
            reply = self._set(handler, self._keys.cut(start, begin + 9, key), cut(start, key + 8, stop))
        if reply is None:
            raise TypeError("a prompt handler leaves nothing unfinished")
        return reply
