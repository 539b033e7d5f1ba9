const PLAIN = /^[\w@%+=:,./-]+$/;

// A text as one word of a shell.
export function shellWord(text) {
    return PLAIN.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
