"""Calls that do not return: known by name, by their place, or by following the callee."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tokmill.store.schema import Array
from tokmill.x86.image.image import Program
from tokmill.x86.image.ranges import distinct, member, without
from tokmill.x86.lift.decode import Flow, Instructions
from tokmill.x86.lift.reach import Ways

_NAMES = """
abort exit _exit _Exit quick_exit thrd_exit pthread_exit longjmp _longjmp siglongjmp __longjmp_chk
err errx verr verrx __assert_fail __assert __assert_perror_fail __stack_chk_fail
__stack_chk_fail_local __chk_fail __fortify_fail __libc_start_main __libc_fatal
terminate __cxa_throw __cxa_rethrow __cxa_bad_cast __cxa_bad_typeid
__cxa_throw_bad_array_new_length __cxa_pure_virtual __cxa_deleted_virtual __cxa_call_unexpected
__cxa_call_terminate __clang_call_terminate _Unwind_Resume _ZSt9terminatev _ZSt10unexpectedv
__rust_start_panic
_CxxThrowException _amsg_exit __report_gsfailure _invoke_watson _invalid_parameter_noinfo_noreturn
_assert _wassert _endthread _endthreadex ExitProcess ExitThread FatalExit FatalAppExitA
FatalAppExitW FreeLibraryAndExitThread RtlExitUserThread RtlExitUserProcess RtlRaiseStatus
RaiseFailFastException
g_assertion_message g_assertion_message_expr g_assertion_message_cmpnum
g_assertion_message_cmpstr g_assertion_message_cmpint g_assertion_message_error g_thread_exit
Py_FatalError Py_Exit _Py_FatalErrorFunc _Py_FatalErrorFormat
Perl_croak Perl_croak_nocontext Perl_croak_no_modify Perl_croak_xs_usage Perl_croak_sv
Perl_croak_memory_wrap Perl_die_unwind Perl_my_exit Perl_my_failure_exit
rb_raise rb_exc_raise rb_bug rb_fatal rb_error_arity rb_memerror rb_throw rb_jump_tag
lua_error luaL_error luaL_argerror luaL_typeerror png_error png_longjmp
runtime.gopanic runtime.throw runtime.fatal runtime.fatalthrow runtime.fatalpanic runtime.block
runtime.panicwrap runtime.goexit1 runtime.exit
"""
NAMES = frozenset(_NAMES.split())
"""Functions of systems, compilers and well-known libraries that never return."""
ORDINARY = frozenset(("err", "errx", "verr", "verrx", "terminate"))
"""Names that a program may use for its own functions: they count only for imports."""
SWITCHING = frozenset(
    f"runtime.{name}{suffix}"
    for name in ("morestack", "morestack_noctxt", "mcall")
    for suffix in ("", ".abi0")
)
"""Functions of Go that switch to another stack; control returns to their caller later."""
PATTERN = re.compile(r"_ZSt\d+__throw_|_ZN4core9panicking\d+(panic|assert_failed)")
BY_STATUS = frozenset(("error", "error_at_line"))
"""They exit if their first argument is not 0."""


class NoReturn:
    """Finds the calls that do not return."""

    def __init__(self, program: Program) -> None:
        self.program = program
        functions = (program.function_address, program.function_name)
        imports = (program.import_address, program.import_name)
        slots = (program.slot_address, program.slot_name)
        # Names of C functions have a leading underscore in Win32.
        cut = program.form == "PE" and program.bits == 32
        self.named = distinct(
            _places([functions], lambda name: _never_returns(name[cut:], NAMES - ORDINARY)),
            _places([imports, slots], lambda name: _never_returns(name[cut:], NAMES)),
        )
        """u8, ascending: addresses of functions and stubs, and of slots with their addresses."""
        self.by_status = _places([imports, slots], BY_STATUS.__contains__)
        self.switching = _places([functions], SWITCHING.__contains__)
        """u8, ascending: functions that return, although no path through them does."""

    def jumps(self, instructions: Instructions) -> Array:
        """Return the rows of jumps to functions that do not return."""
        flow = instructions.flow[instructions.transfer]
        leave = (flow == Flow.JUMP) | (flow == Flow.JUMP_INDIRECT)
        found: Array = instructions.transfer[leave & member(instructions.target, self.named)]
        return found

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
        no_return[maybe] |= _status(instructions, rows[maybe])
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
        found: Array = rows[no_return]
        return found


def follow(ways: Ways, no_return: NoReturn) -> Array:
    """Return the rows of direct calls whose callee cannot return, given the ways.

    Unknown targets (indirect jumps, jumps out of the program, invalid code) may return.
    """
    instructions = ways.instructions
    flow = instructions.flow[instructions.transfer]
    ends = (flow == Flow.RETURN) | (flow == Flow.INVALID) | (flow == Flow.JUMP_INDIRECT)
    resolved = np.isin(instructions.transfer, ways.source) & (flow == Flow.JUMP_INDIRECT)
    rows = np.concatenate([instructions.transfer[ends & ~resolved], ways.missing_source])
    rows = without(rows, no_return.jumps(instructions))
    switching = instructions.row(instructions.code.offset(no_return.switching))
    rows = np.concatenate([rows, switching[switching >= 0]])
    found: Array = ways.call[~ways.returning(rows)]
    return found


def _never_returns(name: str, known: frozenset[str]) -> bool:
    name = name.partition("@")[0].removesuffix(".abi0")
    return name in known or PATTERN.match(name) is not None


def _places(tables: list[tuple[Array, list[str]]], test: Callable[[str], bool]) -> Array:
    found = [
        addresses[np.asarray([i for i, name in enumerate(names) if test(name)], np.int64)]
        for addresses, names in tables
    ]
    return distinct(*found)


def _status(instructions: Instructions, rows: Array) -> Array:
    """Return whether the first argument of some calls is a number other than 0.

    It is set by `mov edi, number` in the straight code before the call; in 32-bit code it is the
    last number that is pushed or stored on the stack.
    """
    found = np.zeros(len(rows), bool)
    data = instructions.code.linked
    for i, row in enumerate(rows.tolist()):
        for before in range(row - 1, max(row - 9, -1), -1):
            at, size = int(instructions.start[before]), int(instructions.length[before])
            if instructions.flow[before]:
                break
            form = data[at : at + size].tobytes()
            if instructions.code.bits == 64 and form[:1] == b"\xbf":
                found[i] = form[1:] != bytes(4)
                break
            if form in (b"\x31\xff", b"\x33\xff"):
                break
            if instructions.code.bits == 32 and form[:1] == b"\x6a":
                found[i] = form[1:] != b"\0"
                break
            if instructions.code.bits == 32 and form[:3] == b"\xc7\x04\x24":
                found[i] = form[3:] != bytes(4)
                break
    return found
