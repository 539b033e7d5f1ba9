// The ticks of a logarithmic axis. Plotly's own are the powers of ten alone, of which an axis may
// have none, or all digits of a decade, one over the other.

import { inDigits } from "../numbers.js";

const LEAST = 3,
    ENOUGH = 5; // ticks with a label: at least, and on a short axis at most
const APART = 34; // px between two labels
const BEYOND = 0.05; // Plotly lets an axis go on by this share of its length
const DIGITS = [[1, 2, 5], [1, 3], [1]]; // of each decade, the most first
const SPARSEST = 100; // decades between two ticks

// low, high: the ends of the values, greater than 0; length: of the axis, in pixels.
export function logTicks(low, high, length) {
    const [from, to] = widened(Math.log10(low), Math.log10(high));
    const most = Math.max(ENOUGH, Math.floor(length / APART));
    const ticks = ofDecades(from, to, most) ?? evenly(10 ** from, 10 ** to);
    return {
        tickmode: "array",
        tickvals: ticks.map(({ value }) => value),
        ticktext: ticks.map(({ text }) => text),
    };
}

// The ends of an axis, as powers of ten. Plotly gives a lone value a decade on either side.
function widened(from, to) {
    const beyond = to > from ? BEYOND * (to - from) : 1;
    return [from - beyond, to + beyond];
}

// As many round numbers as there is room for; null for an axis that has too few of them.
function ofDecades(from, to, most) {
    const isRight = ({ length }) => length >= LEAST && length <= most;
    for (const digits of DIGITS) {
        const found = between(from, to, 1, digits);
        if (isRight(found)) return found;
    }
    for (let step = 2; step < SPARSEST; step += 1) {
        const found = between(from, to, step, [1]);
        if (isRight(found)) return found;
    }
    return null;
}

function between(from, to, step, digits) {
    const found = [];
    for (let power = step * Math.floor(from / step); power <= to; power += step) {
        for (const digit of digits) {
            const at = power + Math.log10(digit);
            // 10 ** -5 is not the number that is written 1e-5.
            const value = Number(`${digit}e${power}`);
            if (at >= from && at <= to) found.push({ value, text: inDigits(value) });
        }
    }
    return found;
}

// Numbers with the same difference, for an axis of less than a decade.
function evenly(low, high) {
    const power = Math.floor(Math.log10((high - low) / LEAST));
    const count = (step) => Math.floor(high / step) - Math.ceil(low / step) + 1;
    const step = [5, 2, 1]
        .map((digit) => Number(`${digit}e${power}`))
        .find((each) => count(each) >= LEAST);
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high; at += 1) {
        const text = (at * step).toFixed(Math.max(0, -power));
        found.push({ value: Number(text), text: low < 1e-4 ? inDigits(Number(text)) : text });
    }
    return found;
}
