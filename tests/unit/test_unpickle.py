"""Pickles as data: equal to what Python reads, and nothing run of what was made to run."""

import collections
import math
import os
import pickle
import pickletools
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokmill.base.errors import MachineError, TokmillError
from tokmill.base.unpickle import Instance, Name, Pickle, array_of

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
# One example is one file in the same folder, written anew.
same_folder = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def put(folder: Path, data: bytes) -> Path:
    path = folder / "a.pkl"
    path.write_bytes(data)
    return path


def load(folder: Path, data: bytes, names: Any = ()) -> Any:
    return Pickle(put(folder, data), names).load()


def entries(folder: Path, data: bytes, names: Any = ()) -> list[tuple[Any, Any]]:
    return list(Pickle(put(folder, data), names).entries())


keys = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 64) + 1, (1 << 64) - 1), st.text(max_size=4),
    st.binary(max_size=4), st.floats(allow_nan=False), st.frozensets(st.integers(0, 9)),
    st.tuples(st.text(max_size=2), st.integers(0, 9)),
)  # fmt: skip
leaves = st.one_of(
    keys, st.integers(), st.text(st.characters(codec=None), max_size=300),
    st.binary(max_size=300), st.sets(st.integers(0, 300), max_size=4),
    st.binary(max_size=4).map(bytearray), st.floats(width=32, allow_nan=False),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=5),
    ),
    max_leaves=25,
)


@same_folder
@given(value=values, protocol=st.sampled_from(PROTOCOLS), twice=st.booleans(), lean=st.booleans())
def test_plain_values_are_what_python_reads(
    tmp_path: Path, value: Any, protocol: int, twice: bool, lean: bool
) -> None:
    # Twice: the second is fetched from the memo.
    data = pickle.dumps([value, value] if twice else value, protocol)
    if lean:
        data = pickletools.optimize(data)
    expected, found = pickle.loads(data), load(tmp_path, data)  # noqa: S301
    assert found == expected
    assert repr(found) == repr(expected)


@same_folder
@given(
    value=st.one_of(st.lists(values, max_size=6), st.dictionaries(keys, values, max_size=6)),
    protocol=st.sampled_from(PROTOCOLS),
)
def test_entries_are_the_value_one_by_one(tmp_path: Path, value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    value = pickle.loads(data)  # noqa: S301
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    assert repr(entries(tmp_path, data)) == repr(pairs)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2500])
def test_entries_of_containers_that_are_written_in_batches(
    tmp_path: Path, protocol: int, count: int
) -> None:
    shared = ["a", 1]
    inner = list(range(1200))
    names = {f"key {i}": [shared, i, inner if i % 500 == 3 else []] for i in range(count)}
    assert entries(tmp_path, pickle.dumps(names, protocol)) == list(names.items())
    rows = list(names.values())
    assert entries(tmp_path, pickle.dumps(rows, protocol)) == list(enumerate(rows))
    kept = collections.defaultdict(list, names)
    assert entries(tmp_path, pickle.dumps(kept, protocol)) == list(names.items())
    tuples = {(f"{i}", i): (i, [i]) for i in range(count)}
    assert entries(tmp_path, pickle.dumps(tuples, protocol)) == list(tuples.items())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_that_stand_for_plain_values(tmp_path: Path, protocol: int) -> None:
    text = {"b": 2, "a": [1]}
    value = {
        "ordered": collections.OrderedDict(text),
        "default": collections.defaultdict(list, text),
        "counter": collections.Counter("aab"),
        "set": {1, 2},
        "frozen": frozenset("ab"),
        "bytes": b"\x00\xff",
        "empty": b"",
        "array": bytearray(b"\x80"),
        "i8": np.int64(-5),
        "u4": np.dtype(">u4").type(7),
        "f4": np.float32(0.5),
        "bool": np.bool_(True),
        "str": np.str_("é"),
    }
    found = load(tmp_path, pickle.dumps(value, protocol))
    assert found == value
    plain = {dict, set, frozenset, bytes, bytearray, int, float, bool, str}
    assert {type(inner) for inner in found.values()} == plain
    assert list(found["ordered"]) == ["b", "a"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype="<u2").reshape(3, 4),
        np.arange(12.0).reshape(3, 4).T,
        np.asfortranarray(np.arange(12, dtype="i8").reshape(3, 4)),
        np.arange(4, dtype=">f4"),
        np.zeros((0, 3), "?"),
        np.asarray(5),
        np.asarray(["ab", "c"]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays(tmp_path: Path, protocol: int, array: Any) -> None:
    found = array_of(load(tmp_path, pickle.dumps(array, protocol)))
    assert found is not None and found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_what_is_no_array_of_numbers(tmp_path: Path) -> None:
    for array in (np.asarray([object(), 1], object), np.zeros(2, [("a", "i4")])):
        assert array_of(load(tmp_path, pickle.dumps(array, 4), None)) is None
    assert array_of([1]) is None
    made = Instance("numpy.dtype", ("i4", False, True), (3, "<"))
    for state in ((1, (3,), made, False, b"1234"), (1, (1 << 62, 4), made, False, b""), (1, 2), 5):
        assert array_of(Instance("numpy.ndarray", (), state)) is None
    made.state = ()
    found = array_of(Instance("numpy.ndarray", (), (1, (1,), made, False, b"\1\0\0\0")))
    assert found is not None and found.tolist() == [1], "a dtype without its byte order"


class Thing:
    """Pickled by its attributes."""

    def __init__(self) -> None:
        self.width = 3
        self.me = self


class Listed(list):  # type: ignore[type-arg]
    """A list with an attribute."""


class Mapped(dict):  # type: ignore[type-arg]
    """A dict of its own class."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_instances_are_inert(tmp_path: Path, protocol: int) -> None:
    listed, mapped = Listed([1, 2]), Mapped(a=1)
    listed.name = "x"
    data = pickle.dumps([Thing(), listed, mapped, os.path.join, math.pi], protocol)
    thing, items, pairs, name, pi = load(tmp_path, data, None)
    assert thing.kind == f"{__name__}.Thing" and thing.state["width"] == 3
    assert thing.state["me"] is thing
    assert items.kind == f"{__name__}.Listed" and items.state == {"name": "x"}
    assert (items.items or items.args[0]) == [1, 2]
    assert pairs.items == [("a", 1)] or pairs.args == ({"a": 1},)
    assert name == Name("posixpath", "join") and pi == math.pi
    # The same with the names that are expected, and with those below a module.
    for names in ([f"{__name__}.Thing", f"{__name__}.Listed"], [f"{__name__}."]):
        data = pickle.dumps([Thing(), listed], protocol)
        assert load(tmp_path, data, names)[0].kind == f"{__name__}.Thing"
    with pytest.raises(TokmillError, match=r"names .*test_unpickle\.Thing, which is not data"):
        load(tmp_path, data, [f"{__name__}.Listed"])


def test_strings_of_python_2(tmp_path: Path) -> None:
    # What Python 2.7 writes of {"a": ["b\xff", u"é", 1L, True]} in protocol 2, 1 and 0.
    both = b"}q\x01U\x01aq\x02]q\x03(U\x02b\xffq\x04X\x02\x00\x00\x00\xc3\xa9q\x05"
    memo, flat = b"\x80\x02" + both + b"\x8a\x01\x01\x88es.", both + b"L1L\nI01\nes."
    text = b"(dp1\nS'a'\np2\n(lp3\nS'b\\xff'\np4\naV\xe9\np5\naL1L\naI01\nas."
    for data in (memo, flat, text):
        assert load(tmp_path, data) == {"a": [b"b\xff", "é", 1, True]}
        assert entries(tmp_path, data) == [("a", [b"b\xff", "é", 1, True])]


def test_an_object_that_holds_itself(tmp_path: Path) -> None:
    value: list[Any] = [1]
    value.append(value)
    found = load(tmp_path, pickle.dumps(value))
    assert found[1] is found


def test_many_fetches_of_one_object(tmp_path: Path) -> None:
    # More than one byte counts.
    value = ["x" * 9] * 1000 + [["y"] * 300]
    assert load(tmp_path, pickle.dumps(value)) == value


def test_a_second_pickle_of_a_file_is_refused(tmp_path: Path) -> None:
    first, second = pickle.dumps([1]), pickle.dumps("b")
    path = put(tmp_path, first + second)
    with pytest.raises(TokmillError, match=f"{len(second)} bytes follow the pickle"):
        Pickle(path).load()
    with pytest.raises(TokmillError, match="perhaps another one"):
        next(Pickle(path).entries())
    inspected = Pickle(path, None)
    assert inspected.load() == [1] and inspected.stop == len(first)


def test_position_grows_with_the_entries(tmp_path: Path) -> None:
    path = put(tmp_path, pickle.dumps([["x" * 100, i] for i in range(5000)]))
    pickled = Pickle(path)
    places = [pickled.position for _ in pickled.entries()]
    assert places == sorted(places) and len(set(places)) == 5
    assert 0 < places[0] < path.stat().st_size / 4 and places[-1] > path.stat().st_size - 1000


def test_entries_are_freed_as_they_were_written(tmp_path: Path) -> None:
    shared = ["s" * 50]
    value = {i: [[f"{i} {j}" * 5 for j in range(2)], shared] for i in range(60_000)}
    path = put(tmp_path, pickle.dumps(value))
    del value

    def peak(work: Any) -> int:
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    whole = peak(Pickle(path).load)
    streamed = peak(lambda: collections.deque(Pickle(path).entries(), maxlen=0))
    assert streamed < whole / 20


# -- what was made to do harm ----------------------------------------------------------------


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `trap` that leaves a mark where it is imported; its `spring` where it is called."""
    code = (
        "import pathlib\nhere = pathlib.Path(__file__).parent\n(here / 'imported').touch()\n"
        "def spring(*args):\n    (here / 'called').touch()\n"
    )
    (tmp_path / "trap.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def quiet(folder: Path) -> bool:
    """Whether nothing was imported, called or touched."""
    marks = {"imported", "called", "touched"} & {path.name for path in folder.iterdir()}
    return not marks and "trap" not in sys.modules


class Harm:
    """Calls something where it is opened."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def called(name: str, *args: bytes) -> bytes:
    """A call of `module:name` with arguments that are programs."""
    module, _, function = name.partition(":")
    return short(module) + short(function) + b"\x93(" + b"".join(args) + b"tR"


TOUCH = "touch touched"
SCANNER_BYPASSES = """
os:system posix:system nt:system subprocess:Popen builtins:eval builtins:exec
builtins:compile builtins:getattr builtins:__import__ __builtin__:apply
importlib:import_module runpy:_run_code runpy:run_path pty:spawn code:interact
operator:attrgetter operator:methodcaller functools:partial functools:reduce
types:FunctionType types:CodeType marshal:loads pickle:loads _pickle:loads torch:load
joblib:load numpy:load numpy.testing._private.utils:runstring
numpy.f2py.crackfortran:getlincoef numpy.core.multiarray:fromfile numpy:fromfile
numpy.distutils.exec_command:exec_command networkx:read_gpickle
networkx.readwrite:write_gml networkx.utils.decorators:argmap
networkx.classes.graph:nx.utils.misc.os.system
networkx.classes.graph:Graph.__init__.__globals__ networkx.classesx:system
networkx:classes. timeit:timeit cProfile:run profile:run trace:Trace pdb:run bdb:Bdb.run
doctest:debug_script pydoc:pipepager webbrowser:open
asyncio.unix_events:_UnixSubprocessTransport._start ensurepip:_run_pip venv:create
lib2to3.pgen2.pgen:ParserGenerator.make_label idlelib.run:Executive.runcode
idlelib.pyshell:ModifiedInterpreter.runcode distutils.file_util:write_file shutil:rmtree
pathlib:Path.touch ctypes:CDLL cffi:FFI socket:create_connection urllib.request:urlopen
ssl:get_server_certificate logging.config:_resolve site:addsitedir zipimport:zipimporter
pkgutil:resolve_name codecs:open builtins:open builtins:type builtins:vars builtins:map
collections:namedtuple copyreg:add_extension copyreg:_inverted_registry
weakref:WeakMethod trap:spring trap.inner:spring builtins:getattr.__class__
builtins:dict.fromkeys builtins:list.__class__ collections:OrderedDict.fromkeys
numpy:dtype.__class__
"""
"""Names that reach a shell, an interpreter or an import; lists of bad names lack some of them."""


@pytest.mark.parametrize("name", SCANNER_BYPASSES.split())
def test_names_that_are_no_data_are_refused(trap: Path, name: str) -> None:
    data = b"\x80\x04" + called(name, short(TOUCH)) + b"."
    for names in ((), ["networkx.classes."]):
        with pytest.raises(TokmillError, match="which is not data") as caught:
            load(trap, data, names)
        assert name.split(":")[0].replace("__builtin__", "builtins") in caught.value.what
        with pytest.raises(TokmillError, match="which is not data"):
            entries(trap, data, names)
    shown = load(trap, data, None)
    assert isinstance(shown, Instance) and shown.args == (TOUCH,)
    assert quiet(trap)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_pickle_writes_of_a_call(trap: Path, protocol: int) -> None:
    command = f"touch {trap / 'touched'}"
    for harm in (Harm(os.system, command), Harm(eval, f"__import__('os').system({command!r})")):
        for value in (harm, [harm], {"a": [1, harm]}, (harm,), {"k": harm, "l": 1}):
            data = pickle.dumps(value, protocol)
            with pytest.raises(TokmillError, match=r"names (posix\.system|builtins\.eval)"):
                load(trap, data)
            with pytest.raises(TokmillError, match="which is not data"):
                entries(trap, data)
            load(trap, data, None)
    assert quiet(trap)


SPRING = b"ctrap\nspring\n"
GRAPH = b"cnetworkx.classes.digraph\nDiGraph\n"
HOSTILE = {
    "chain of getattr": called(
        "builtins:getattr", called("builtins:__import__", short("trap")), short("spring")
    )[:-2] + b"tR)R.",
    "a call of what a call gave": b"cbuiltins\nset\n)R)R.",
    "names from the memo": short("spring") + b"\x94" + short("trap") + b"\x9400h\x01h\x00\x93)R.",
    "names from a numbered memo": short("spring") + b"q\x05" + short("trap")
                                  + b"r\x00\x01\x00\x0000j\x00\x01\x00\x00h\x05\x93)R.",
    "names that were duplicated": short("trap") + b"2" + b"0" + short("spring") + b"\x93)R.",
    "nested pickle": b"c_pickle\nloads\n(C" + bytes([len(SPRING) + 3]) + SPRING + b")R.tR.",
    "extension 1": b"\x82\x01)R.",
    "extension 2": b"\x83\x01\x00)R.",
    "extension 4": b"\x84\x01\x00\x00\x00)R.",
    "persistent id, text": b"Ptrap\n.",
    "persistent id, binary": SPRING + b"Q.",
    "INST": b"(S'x'\nitrap\nspring\n.",
    "OBJ": b"(" + SPRING + b"S'x'\no.",
    "NEWOBJ": SPRING + b")\x81.",
    "NEWOBJ_EX": SPRING + b")}\x92.",
    "BUILD with __setstate__": GRAPH + b")\x81}" + short("__setstate__") + SPRING + b"sb"
                               + short(TOUCH) + b"b.",
    "BUILD with __reduce__": GRAPH + b")\x81}" + short("__reduce__") + SPRING + b"sb.",
    "BUILD of a class": GRAPH + b"}" + short("__class__") + SPRING + b"sb.",
    "BUILD of a dict": b"}}" + short("a") + b"K\x01sb.",
    "a class in the state": GRAPH + b")\x81}" + short("_node") + SPRING + b")Rsb.",
    "a factory": b"ccollections\ndefaultdict\n(" + SPRING + b"tR.",
    "_reconstructor": b"ccopy_reg\n_reconstructor\n(" + SPRING + b"c__builtin__\nobject\nNtR.",
    "out-of-band buffer": b"\x97.",
    "read-only buffer": b"C\x01a\x98.",
    "a call of a string": short("os.system") + b"(" + short(TOUCH) + b"tR.",
    "a call of a list": b"])R.",
    "arguments that are no tuple": b"cbuiltins\nset\n]R.",
    "a name that is not text": b"K\x01K\x02\x93.",
    "a name that is long": b"c" + b"a" * 600 + b"\nb\n.",
    "a name without an end": b"ctrap\nspring",
    "an unknown operation": b"\xff.",
    "a later protocol": b"\x80\x06N.",
    "an empty stack": b".",
    "a mark alone": b"(.",
    "no mark": b"K\x01e.",
    "a fetch of nothing": b"h\x07.",
    "a fetch far away": b"j\xff\xff\xff\xff.",
    "a fetch by no number": b"gabc\n.",
    "a fetch below 0": b"g-1\n.",
    "a key without value": b"}(K\x01u.",
    "a key that is a list": b"}]K\x01s.",
    "a set of lists": b"\x8f(]\x90.",
    "bad UTF-8": b"\x8c\x01\xff.",
    "bad number": b"Iabc\n.",
    "a string without quotes": b"Sabc\n.",
    "a bad escape": b"S'\\x'\n.",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("header", [b"", b"\x80\x05"], ids=["bare", "protocol"])
def test_programs_that_are_no_data(trap: Path, name: str, header: bytes) -> None:
    for names in ((), ["networkx.classes."]):
        with pytest.raises(TokmillError) as caught:
            load(trap, header + HOSTILE[name], names)
        assert str(trap / "a.pkl") in caught.value.where and caught.value.hint
        with pytest.raises(TokmillError):
            entries(trap, header + HOSTILE[name], names)
    try:
        load(trap, header + HOSTILE[name], None)
    except TokmillError:
        pass
    assert quiet(trap)


def test_build_sets_no_attribute_of_an_instance(trap: Path) -> None:
    state = b"}(" + short("kind") + short("x") + short("args") + b"]u"
    found = load(trap, GRAPH + b")\x81" + state + b"b.", ["networkx.classes."])
    assert found.kind == "networkx.classes.digraph.DiGraph" and found.args == ()
    assert found.state == {"kind": "x", "args": []}
    assert "networkx" not in sys.modules or quiet(trap)


LARGE = (1 << 62).to_bytes(8, "little")
BOMBS = {
    "text": b"\x8d" + LARGE + b"a.",
    "bytes": b"\x8e" + LARGE + b"a.",
    "bytearray": b"\x96" + LARGE + b"a.",
    "short of bytes": b"B\xff\xff\xff\x7fa.",
    "integer": b"\x8b\xff\xff\xff\x7fa.",
    "integer below 0": b"\x8b\xff\xff\xff\xffa.",
    "old string": b"T\xff\xff\xff\x7fa.",
    "frame": b"\x95" + LARGE,
    "integer of 4 KiB": b"\x8b" + struct.pack("<I", 4096) + bytes(4096) + b".",
    "digits": b"L" + b"9" * 100_000 + b"L\n.",
    "sets": b"(" + b"\x8f" * 100_000 + b"t.",
    "copies of a list": b"(" + b"N" * 10_000 + b"l\x940"
                        + b"cbuiltins\nset\nh\x00\x85R0" * 1000 + b"N.",
    "copies of text": b"X" + struct.pack("<I", 1 << 16) + b"a" * (1 << 16) + b"\x940"
                      + b"c_codecs\nencode\nh\x00\x8c\x06latin1\x86R0" * 1000 + b"N.",
    "a key of doubled tuples": b")" + b"2\x86" * 60 + b"\x940}h\x00K\x01s.",
    "a set of doubled tuples": b"\x8f()" + b"2\x86" * 60 + b"\x90.",
    "a frozenset of doubled tuples": b"()" + b"2\x86" * 60 + b"\x91.",
    "one tuple, a key many times": b"(" + b"K\x01" * 2000 + b"t\x940}(" + b"h\x00N" * 2000 + b"u.",
    "integers with one hash": b"}(" + b"".join(
        b"\x8a\x0b" + (((1 << 61) - 1) * n).to_bytes(11, "little") + b"N" for n in range(1, 50)
    ) + b"u.",
    "an integer that Python does not write out": b"\x8b\xdc\x05\0\0" + bytes(1499) + b"\x01.",
    "a key of deep tuples": b")" + b"\x85" * 50_000 + b"\x940}h\x00K\x01s.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_little_cost(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokmill.base.unpickle.inert.SPARE", 1 << 20)
    path = put(tmp_path, BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(TokmillError):
            Pickle(path, None).load()
        assert tracemalloc.get_traced_memory()[1] < (4 << 20) + 100 * len(BOMBS[name])
    finally:
        tracemalloc.stop()


def test_large_keys_are_read(tmp_path: Path) -> None:
    value = {(1 << 64) - 1: 1, tuple(range(100)): 2, (1, (2, 3)): {4, -(1 << 63)}}
    assert load(tmp_path, pickle.dumps(value)) == value


def test_a_call_for_a_large_bytearray_is_no_call(tmp_path: Path) -> None:
    found = load(tmp_path, b"cbuiltins\nbytearray\n(\x8a\x06" + bytes(5) + b"\x40tR.")
    assert isinstance(found, Instance) and found.args == (1 << 46,)


def test_arguments_are_not_looked_into(tmp_path: Path) -> None:
    # To write this tuple out would take 2^60 steps.
    doubled = b")" + b"2\x86" * 60
    for name in (b"numpy.core.multiarray\n_reconstruct", b"copyreg\n_reconstructor",
                 b"numpy.core.multiarray\nscalar", b"_codecs\nencode", b"collections\nCounter",
                 b"builtins\nset", b"copyreg\n__newobj__", b"numpy\ndtype"):  # fmt: skip
        for args in (b"\x85", b"2\x86", b"22\x87"):
            load(tmp_path, b"c" + name + b"\n" + doubled + args + b"R.")


def test_a_memo_number_costs_nothing(tmp_path: Path) -> None:
    path = put(tmp_path, b"]r\xff\xff\xff\x7fp999999999999\n.")
    tracemalloc.start()
    try:
        assert Pickle(path).load() == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("step", [b"\x85", b"l", b"R"])
def test_depth_does_not_recurse(tmp_path: Path, step: bytes) -> None:
    deep = 200_000
    if step == b"l":
        data = b"(" * deep + b"l" * deep + b"."
    elif step == b"R":
        data = b"cbuiltins\nobject\n" + b")R" * deep + b"."
    else:
        data = b")" + step * deep + b"."
    value = load(tmp_path, data, None)
    levels = 0
    while value and not isinstance(value, Instance):
        value, levels = value[0], levels + 1
    assert levels == (0 if step == b"R" else deep - (step == b"l"))


def test_neither_a_dict_nor_a_list_has_entries(tmp_path: Path) -> None:
    for value, kind in ((5, "int"), ("a", "str"), (([1], [2]), "tuple"), ({1, 2}, "set")):
        with pytest.raises(TokmillError, match=f"holds a {kind}, not a dict or a list"):
            entries(tmp_path, pickle.dumps(value))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_cut_is_refused(tmp_path: Path, protocol: int) -> None:
    value = {"a": [1, 2.5, "x" * 30, b"y", (1, 2)], "b": collections.OrderedDict(c=1 << 70)}
    data = pickle.dumps([value, value], protocol)
    for length in range(1, len(data)):
        with pytest.raises(TokmillError):
            load(tmp_path, data[:length])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TokmillError, match="empty"):
        load(tmp_path, b"")
    with pytest.raises(MachineError):
        Pickle(tmp_path / "none.pkl").load()
    with pytest.raises(MachineError):
        Pickle(tmp_path).load()


SAMPLE = pickle.dumps(
    [{"a": (1, 2.5), "b": {"x", "y"}}, np.arange(3), collections.Counter("aa"), b"z" * 9, -1], 4
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_never_raises_anything_else(trap: Path, data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([SAMPLE, pickle.dumps([[1], "a"], 0), b""])))
    raw += data.draw(st.binary(max_size=30))
    for _ in range(data.draw(st.integers(0, 4))):
        if raw:
            place = data.draw(st.integers(0, len(raw) - 1))
            piece = data.draw(
                st.sampled_from([b"\x93", b"R", b"(", b"t", b"\x81", b"b", b"h\x00", b""])
            )
            raw[place : place + 1] = piece or bytes([data.draw(st.integers(0, 255))])
    for names in ((), None):
        try:
            load(trap, bytes(raw), names)
        except TokmillError:
            pass
    assert quiet(trap)
