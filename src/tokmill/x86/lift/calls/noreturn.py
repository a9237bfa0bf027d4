"""Calls that do not return: known by name, by their place, or by following the callee."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tokmill import plugins
from tokmill.store.schema import Array
from tokmill.x86.image.image import Program, distinct, member, without
from tokmill.x86.lift.decode import DIRECT, Flow, Instructions
from tokmill.x86.lift.reach import Ways
from tokmill.x86.lift.switches.symbolic import Path

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
        result: Array = instructions.transfer[leave & member(instructions.target, self.named)]
        return result

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
        result: Array = rows[no_return]
        return result


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
    result: Array = ways.call[~ways.returning(rows)]
    return result


def _never_returns(name: str, known: frozenset[str]) -> bool:
    name = name.partition("@")[0].removesuffix(".abi0")
    return name in known or PATTERN.match(name) is not None


def _places(tables: list[tuple[Array, list[str]]], test: Callable[[str], bool]) -> Array:
    found = [
        addresses[np.asarray([i for i, name in enumerate(names) if test(name)], np.int64)]
        for addresses, names in tables
    ]
    return distinct(*found)


def _status(program: Program, instructions: Instructions, rows: Array) -> Array:
    """Return whether the first argument of some calls is a number other than 0.

    The straight code before a call is executed, from where other code may jump into it.
    """
    iced = plugins.require("iced_x86").Register
    register = iced.RCX if program.form == "PE" else iced.RDI
    leads = DIRECT[instructions.flow[instructions.transfer]]
    entered = instructions.marks(instructions.code.offset(instructions.target[leads]))
    goes_on = np.isin(instructions.flow, (Flow.NEXT, Flow.CALL, Flow.CALL_INDIRECT))
    result = np.zeros(len(rows), bool)
    for i, row in enumerate(rows.tolist()):
        first = row
        while first > max(0, row - STRAIGHT) and not entered[first] and goes_on[first - 1]:
            first -= 1
        path = Path(program.bits, {}, {}, {})
        path.run([instructions.instruction(one) for one in range(first, row + 1)])
        status = path.argument(register)
        result[i] = not status.terms and status.number != 0
    return result
