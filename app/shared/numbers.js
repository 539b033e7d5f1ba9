// Numbers, in the format that the server writes them in (`in_digits` in app/labels.py).

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

// 0.01234, 0.00012 or 1.2×10⁻⁵: at most four digits.
export function inDigits(value) {
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e5)) return inPowers(value);
    if (size >= 1e4) return value.toFixed(0);
    return String(Number(value.toPrecision(size < 1e-3 ? 3 : 4)));
}

// A value in a label that comes and goes under the pointer: 541, 43.03, 2.345 or 0.0123, as losses
// are written elsewhere.
export function inHover(value) {
    const size = Math.abs(value);
    if (size >= 1e5 || size < 0.1) return inDigits(Number(value.toPrecision(3)));
    if (size >= 100) return value.toFixed(0);
    return String(Number(value.toFixed(size >= 10 ? 2 : 3)));
}

function inPowers(value) {
    const [mantissa, power] = value.toExponential(2).split("e");
    const raised = String(Math.abs(power)).replace(/\d/g, (digit) => SUPERSCRIPTS[digit]);
    return `${Number(mantissa)}×10${power < 0 ? "⁻" : ""}${raised}`;
}
