"""A calculator for text that a model wrote: numbers and + - * / // % ** only, from the syntax tree, within limits.

Nothing is executed: there are no names, calls, attributes or strings, and every value on the way is bounded before it is made.
"""

import ast
import math
import operator
import threading

MAX_CHARACTERS = 200
MAX_BITS = 2048  # of any whole number on the way
MAX_EXPONENT = 256
_DIGITS = 12  # of a fraction shown
_parser = threading.Lock()  # CPython 3.11 counts the depth of all threads' trees together and may then raise SystemError

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(Exception):
    """An expression that is not calculated; its text may be shown to the model."""


def calculate(expression: str) -> str:
    """Returns the value as text: whole numbers exactly, fractions to 12 digits. Raises CalculatorError."""
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(f"longer than {MAX_CHARACTERS} characters")
    try:
        with _parser:
            tree = ast.parse(expression.strip().replace("^", "**").replace(",", ""), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CalculatorError("not an expression of numbers and + - * / // % **") from None
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("too large") from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculatorError("too large")
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.{_DIGITS}g}"
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
    raise ValueError("not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if abs(exponent) > MAX_EXPONENT:
        raise OverflowError
    if isinstance(base, int) and exponent > 0 and base.bit_length() * exponent > MAX_BITS:
        raise OverflowError
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("not a real number")
    return _bounded(result)


def _bounded(number: int | float) -> int | float:
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise OverflowError
    return number
