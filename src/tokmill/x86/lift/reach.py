"""Which instructions can be reached, and from which control can return.

A *run* is a sequence of instructions, each of which falls through to the next. If an instruction is
reached, the rest of its run is reached; if control can return from an instruction, it can return
from all earlier ones of its run. So both questions are answered in a few steps over runs.

Calls that do not return are known by name, by their place, or by following the callee.
"""

import re
from collections.abc import Callable
from typing import Any

import iced_x86 as iced
import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, changes, distinct, expand, member, without
from tokmill.x86.lift.decode import DIRECT, FALLS, Flow, Instructions
from tokmill.x86.lift.switches.symbolic import Path


class Ways:
    """All ways (control flow edges) between decoded instructions; calls are kept separately.

    `no_return`: rows of calls that do not return. `tables`: resolved indirect jumps as pairs of
    offsets, a jump and one of its targets. R runs, W ways.
    """

    def __init__(
        self, instructions: Instructions, no_return: Array, tables: tuple[Array, Array]
    ) -> None:
        self.instructions, self.no_return = instructions, no_return
        code, start = instructions.code, instructions.start
        falls = FALLS[instructions.flow]
        falls[no_return] = False
        end = start + instructions.length
        follows = np.zeros(len(start), bool)
        follows[:-1] = end[:-1] == start[1:]
        # Offsets continue from one section to the next, addresses do not.
        begins = instructions.row(code.edge[1:-1])
        follows[begins[begins > 0] - 1] = False
        self._set_runs(np.flatnonzero(~(falls & follows)))
        odd = np.flatnonzero(falls & ~follows)
        at = end[odd].astype(np.int64)
        odd_target = np.where(member(at, code.edge), -1, at)
        flow = instructions.flow[instructions.transfer]
        calls = flow == Flow.CALL
        jumps = DIRECT[flow] & ~calls
        jumped = code.offset(instructions.target[jumps])
        table = instructions.row(tables[0])
        there = table >= 0
        source = np.concatenate([instructions.transfer[jumps], odd, table[there]])
        offset = np.concatenate([jumped, odd_target, tables[1][there]])
        order = np.argsort(source, kind="stable")
        source, offset = source[order], offset[order]
        target = instructions.row(offset)
        decoded = target >= 0
        self._set_ways(source[decoded], target[decoded])
        self.missing_source, self.missing = source[~decoded], offset[~decoded]
        """Ways to places without an instruction: row, and offset (-1: not in code)."""
        self.call = instructions.transfer[calls]
        """(C,) i8, ascending: rows of direct calls."""
        self.callee = code.offset(code.behind_stubs(instructions.target[calls]))
        """(C,) i8, the offsets of their callees; -1: not in code."""
        # A `call` of the next instruction pushes its address and calls nothing.
        self.callee[self.callee == end[self.call]] = -1
        self.callee_row = instructions.row(self.callee)

    def _set_runs(self, last: Array) -> None:
        self.last = last
        """(R,) i8, the last row of each run."""
        self.run = self._parts(last)
        """(I,) i4, the run of each row."""
        self.first = np.full(len(last), len(self.instructions.start), np.int64)
        """(R,) i8, the first reached row of each run; the number of all rows if none is reached."""
        self.known: dict[str, Any] = {}
        """What other code has computed for the reached rows; emptied when there are more."""
        self.called = np.zeros(0, np.int64)
        """i8, ascending: offsets of the callees of reached code."""

    def _set_ways(self, source: Array, target: Array) -> None:
        self.source = source
        """(W,) i8, ascending: rows with a way other than falling through."""
        self.target = target
        """(W,) i8, the rows to which these ways lead."""
        self._into = np.argsort(target, kind="stable")
        self._ordered_target = target[self._into]

    def end_at(self, calls: Array) -> None:
        """Let more calls (rows) not return; what was reached is forgotten."""
        self.no_return = distinct(self.no_return, calls)
        self._set_runs(distinct(self.last, calls))
        # Behind some of them another instruction overlaps the next one, or there is none.
        kept = ~member(self.source, calls)
        if not kept.all():
            self._set_ways(self.source[kept], self.target[kept])
        kept = ~member(self.missing_source, calls)
        self.missing_source, self.missing = self.missing_source[kept], self.missing[kept]

    def _parts(self, last: Array) -> Array:
        """Return the part of each row, given the last row of each part: (I,) i4."""
        result = np.zeros(len(self.instructions.start), np.int32)
        result[last[:-1] + 1] = 1
        return np.cumsum(result, dtype=np.int32, out=result)

    def begin(self, row: int) -> int:
        run = int(self.run[row])
        return int(self.last[run - 1]) + 1 if run else 0

    def into(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the ways (source, target) to rows from low to high, the last target first."""
        target = self._ordered_target
        first, last = np.searchsorted(target, low), np.searchsorted(target, high, side="right")
        rows = self._into[first:last][::-1]
        return list(zip(self.source[rows].tolist(), self.target[rows].tolist(), strict=True))

    def reach(self, rows: Array) -> None:
        """Mark everything that can be reached from some rows, also through calls."""
        called = [self.called]
        while len(rows):
            rows = distinct(rows)
            run = self.run[rows]
            lowest = changes(run) & (rows < self.first[run])
            rows, run = rows[lowest], run[lowest]
            before = np.minimum(self.first[run], self.last[run] + 1)
            self.first[run] = rows
            if len(rows):
                self.known.clear()
            low = np.searchsorted(self.source, rows)
            ways = expand(low, np.searchsorted(self.source, before) - low)
            low = np.searchsorted(self.call, rows)
            calls = expand(low, np.searchsorted(self.call, before) - low)
            called.append(self.callee[calls])
            callee = self.callee_row[calls]
            rows = np.concatenate([self.target[ways], callee[callee >= 0]])
        offsets = distinct(*called)
        self.called = offsets[offsets >= 0]

    def lacking(self) -> Array:
        """Return the offsets to which reached code leads, but at which there is no instruction."""
        offsets = self.missing[self.reached(self.missing_source)]
        called = self.called[self.instructions.row(self.called) < 0]
        return distinct(offsets[offsets >= 0], called)

    def reached(self, rows: Array) -> Array:
        return rows >= self.first[self.run[rows]] if len(rows) else np.zeros(0, bool)

    def all_reached(self) -> Array:
        before = np.minimum(self.first, self.last + 1)
        counts = np.empty(2 * len(self.last), np.int64)
        counts[0::2] = before
        counts[2::2] -= self.last[:-1] + 1
        counts[1::2] = self.last + 1 - before
        return np.repeat(np.arange(len(counts)) % 2 == 1, counts)

    def returning(self, rows: Array) -> Array:
        """Return which calls return, given the rows at which functions return.

        Bool, one for each of `call`. A call returns if one of `rows` can be reached from its callee
        without passing a call that does not return. A function that only returns after calling
        itself never returns.
        """
        followed = np.flatnonzero((self.callee_row >= 0) & ~member(self.call, self.no_return))
        call, callee = self.call[followed], self.callee_row[followed]
        heads = distinct(callee)
        own = np.searchsorted(heads, call, side="right") - 1
        doubtful = (own >= 0) & (callee == heads[own]) if len(heads) else np.zeros(0, bool)
        while True:
            part, leading = self._leading(rows, call[doubtful], callee[doubtful])
            lost = callee > leading[part[callee]]
            if not (lost & ~doubtful).any():
                break
            doubtful |= lost
        answer = np.ones(len(self.call), bool)
        answer[followed] = ~lost
        return answer

    def _leading(self, rows: Array, call: Array, callee: Array) -> tuple[Array, Array]:
        """Return from where one of `rows` can be reached, searching backwards.

        Code before one of the calls `call` counts only if the callee leads to `rows` too. The
        result is the part (run, cut after these calls) of each row, and the last row of each part
        that leads to one of `rows`, or -1.
        """
        # Both are ascending: merging them is many times faster than sorting.
        last = np.sort(np.concatenate([self.last, without(call, self.last)]), kind="stable")
        begin = np.concatenate([[0], last[:-1] + 1])
        part_of = self._parts(last)
        goes_on = np.ones(len(last), bool)
        goes_on[part_of[self.last]] = False
        leading = np.full(len(last), -1, np.int64)
        by_callee = np.argsort(callee, kind="stable")
        ordered = callee[by_callee]
        comes_back, left_behind = np.zeros(len(call), bool), np.zeros(len(call), bool)
        while len(rows):
            rows = distinct(rows)
            part = part_of[rows]
            highest = np.ones(len(rows), bool)
            highest[:-1] = part[1:] != part[:-1]
            highest &= rows > leading[part]
            rows, part = rows[highest], part[highest]
            fresh = part[(leading[part] < 0) & (part > 0)] - 1
            low = np.maximum(leading[part] + 1, begin[part])
            leading[part] = rows
            first = np.searchsorted(self._ordered_target, low)
            count = np.searchsorted(self._ordered_target, rows, side="right") - first
            before = self.source[self._into[expand(first, count)]]
            # The part before it, which ends in a call, falls through to it.
            before = np.concatenate([before, last[fresh[goes_on[fresh]]]])
            if len(call):
                first = np.searchsorted(ordered, low)
                count = np.searchsorted(ordered, rows, side="right") - first
                now = by_callee[expand(first, count)]
                comes_back[now] = True
                at = np.minimum(np.searchsorted(call, before), len(call) - 1)
                is_call = call[at] == before
                left_behind[at[is_call]] = True
                is_call[is_call] = ~comes_back[at[is_call]]
                before = np.concatenate([before[~is_call], call[now[left_behind[now]]]])
            rows = before
        return part_of, leading


_LIBRARIES = {
    "C: ISO C, POSIX, glibc, BSD err(3)": """
abort exit _exit _Exit quick_exit thrd_exit pthread_exit longjmp _longjmp siglongjmp __longjmp_chk
err errx errc verr verrx verrc __assert_fail __assert __assert_perror_fail __stack_chk_fail
__stack_chk_fail_local __chk_fail __fortify_fail __libc_start_main __libc_fatal""",
    "C++ and Rust: the Itanium ABI, libsupc++, compiler-rt": """
terminate __cxa_throw __cxa_rethrow __cxa_bad_cast __cxa_bad_typeid
__cxa_throw_bad_array_new_length __cxa_pure_virtual __cxa_deleted_virtual __cxa_call_unexpected
__cxa_call_terminate __clang_call_terminate _Unwind_Resume _ZSt9terminatev _ZSt10unexpectedv
__rust_start_panic""",
    "Sanitizers: compiler-rt and libsanitizer, what -fno-sanitize-recover calls": """
__ubsan_handle_builtin_unreachable __ubsan_handle_missing_return __msan_warning_noreturn
__msan_warning_with_origin_noreturn""",
    "Fortran: libgfortran.h": """
_gfortran_runtime_error _gfortran_runtime_error_at _gfortran_os_error _gfortran_os_error_at
_gfortran_internal_error _gfortran_exit_i4 _gfortran_exit_i8 _gfortran_abort
_gfortran_caf_error_stop _gfortran_caf_error_stop_str""",
    "Ada: a-except.adb of GNAT": """
__gnat_raise_exception __gnat_raise_nodefer_with_msg __gnat_reraise __gnat_last_chance_handler
__gnat_raise_program_error __gnat_raise_constraint_error __gnat_raise_storage_error
ada__exceptions__raise_exception_always system__assertions__raise_assert_failure""",
    "Windows: the C runtime, kernel32, ntdll": """
_CxxThrowException _amsg_exit __report_gsfailure _invoke_watson _invalid_parameter_noinfo_noreturn
_assert _wassert _endthread _endthreadex ExitProcess ExitThread FatalExit FatalAppExitA
FatalAppExitW FreeLibraryAndExitThread RtlExitUserThread RtlExitUserProcess RtlRaiseStatus
RaiseFailFastException""",
    "GLib, CPython, Perl, Ruby, Lua, libpng: their headers": """
g_assertion_message g_assertion_message_expr g_assertion_message_cmpnum
g_assertion_message_cmpstr g_assertion_message_cmpint g_assertion_message_error g_thread_exit
Py_FatalError Py_Exit _Py_FatalErrorFunc _Py_FatalErrorFormat
Perl_croak Perl_croak_nocontext Perl_croak_no_modify Perl_croak_xs_usage Perl_croak_sv
Perl_croak_memory_wrap Perl_die_unwind Perl_my_exit Perl_my_failure_exit
rb_raise rb_exc_raise rb_bug rb_fatal rb_error_arity rb_memerror rb_throw rb_jump_tag
lua_error luaL_error luaL_argerror luaL_typeerror png_error png_longjmp""",
    "Go: its runtime": """
runtime.gopanic runtime.throw runtime.fatal runtime.fatalthrow runtime.fatalpanic runtime.block
runtime.panicwrap runtime.goexit1 runtime.exit""",
}
"""Library → functions that never return."""
NAMES = frozenset(" ".join(_LIBRARIES.values()).split())
ORDINARY = frozenset(("err", "errx", "errc", "verr", "verrx", "verrc", "terminate"))
"""Names that a program may use for its own functions: they count only for imports."""
SWITCHING = frozenset(
    f"runtime.{name}{suffix}"
    for name in ("morestack", "morestack_noctxt", "mcall")
    for suffix in ("", ".abi0")
)
"""Functions of Go that switch to another stack; control returns to their caller later."""
PATTERN = re.compile(
    r"_ZSt\d+__throw_|_ZN4core9panicking\d+(panic|assert_failed)"
    r"|__ubsan_handle_\w+_abort$|__asan_report_(exp_)?(load|store)(_n|\d+)$"
    r"|_gfortran_(caf_)?(error_)?stop_|__gnat_rcheck_"
)
"""Families of such functions; the reports of `-fsanitize-recover` end otherwise."""
BY_STATUS = frozenset(("error", "error_at_line"))
"""They exit if their first argument is not 0."""
STRAIGHT = 24
"""Instructions before such a call that are executed to find this argument."""


class NoReturn:
    """Finds the calls that do not return."""

    def __init__(self, program: Program) -> None:
        self.program = program
        functions = (program.function_address, program.function_name)
        imports = (program.import_address, program.import_name)
        slots = (program.slot_address, program.slot_name)
        # Symbols of C functions have a leading underscore in Win32, names in import tables do not.
        cut = program.form == "PE" and program.bits == 32
        self.named = distinct(
            _places([functions], lambda name: _never_returns(name[cut:], NAMES - ORDINARY)),
            _places([imports, slots], lambda name: _never_returns(name, NAMES)),
        )
        """u8, ascending: addresses of functions and stubs, and of slots with their addresses."""
        self.by_status = _places([imports, slots], BY_STATUS.__contains__)
        self.switching = _places([functions], SWITCHING.__contains__)
        """u8, ascending: functions that return, although no path through them does."""

    def jumps(self, instructions: Instructions) -> Array:
        flow = instructions.flow[instructions.transfer]
        leave = (flow == Flow.JUMP) | (flow == Flow.JUMP_INDIRECT)
        return instructions.transfer[leave][member(instructions.target[leave], self.named)]

    def calls(self, instructions: Instructions) -> Array:
        """Return the rows of calls that do not return, without following the callees.

        They call functions that are known by name, or are the last instruction of a range in unwind
        tables or symbols.
        """
        flow = instructions.flow[instructions.transfer]
        is_call = (flow == Flow.CALL) | (flow == Flow.CALL_INDIRECT)
        rows, target = instructions.transfer[is_call], instructions.target[is_call]
        no_return = member(target, self.named)
        maybe = np.flatnonzero(member(target, self.by_status))
        if len(maybe):
            no_return[maybe] |= _status(self.program, instructions, rows[maybe])
        code = instructions.code
        at = code.address(instructions.start[rows].astype(np.int64))
        end = at + instructions.length[rows]
        unwind, program = self.program.unwind, self.program
        for start, stop in (
            (unwind.start, unwind.stop),
            (program.function_address, program.function_address + program.function_size),
        ):
            if len(start):
                inside = np.searchsorted(start, at, side="right") - 1
                no_return |= (inside >= 0) & (end == stop[inside])
        return rows[no_return]


def follow(ways: Ways, no_return: NoReturn) -> Array:
    """Return the rows of direct calls whose callee cannot return, given the ways.

    Unknown targets (indirect jumps, jumps out of the program, invalid code) may return.
    """
    instructions = ways.instructions
    flow = instructions.flow[instructions.transfer]
    ends = instructions.transfer[(flow == Flow.RETURN) | (flow == Flow.INVALID)]
    jumps = instructions.transfer[flow == Flow.JUMP_INDIRECT]
    rows = np.concatenate([ends, jumps[~member(jumps, ways.source)], ways.missing_source])
    rows = without(rows, no_return.jumps(instructions))
    switching = instructions.row(instructions.code.offset(no_return.switching))
    rows = np.concatenate([rows, switching[switching >= 0]])
    return ways.call[~ways.returning(rows)]


def _never_returns(name: str, names: frozenset[str]) -> bool:
    name = name.partition("@")[0].removesuffix(".abi0")
    return name in names or PATTERN.match(name) is not None


def _places(tables: list[tuple[Array, list[str]]], test: Callable[[str], bool]) -> Array:
    parts = [
        addresses[np.asarray([i for i, name in enumerate(names) if test(name)], np.int64)]
        for addresses, names in tables
    ]
    return distinct(*parts)


def _status(program: Program, instructions: Instructions, rows: Array) -> Array:
    """Return whether the first argument of some calls is a number other than 0.

    The straight code before a call is executed, from where other code may jump into it.
    """
    register = iced.Register.RCX if program.form == "PE" else iced.Register.RDI
    leads = DIRECT[instructions.flow[instructions.transfer]]
    entered = instructions.marks(instructions.code.offset(instructions.target[leads]))
    goes_on = np.isin(instructions.flow, (Flow.NEXT, Flow.CALL, Flow.CALL_INDIRECT))
    result = np.zeros(len(rows), bool)
    for i, row in enumerate(rows.tolist()):
        first = row
        while first > max(0, row - STRAIGHT) and not entered[first] and goes_on[first - 1]:
            first -= 1
        path = Path(program.bits, {}, {}, {})
        path.run(instructions.instructions_in(range(first, row + 1)))
        status = path.argument(register)
        result[i] = not status.terms and status.number != 0
    return result
