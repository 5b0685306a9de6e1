// Texts that models, users and other servers have written.

// Returns a text whose direction-changing characters are escapes, so that it reads as it is stored.
export const visible = text => String(text).replace(/\p{Bidi_Control}/gu, char => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`);
