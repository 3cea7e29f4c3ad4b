// Unpacks a run: base64, deflate, then columns of whole numbers, as pack.py wrote them.

const $ = (id) => document.getElementById(id);

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Reads columns one after the other. Seven bits a byte, the lowest first. */
class Columns {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  next() {
    const { bytes } = this;
    let value = bytes[this.at++];
    if (value < 128) return value;
    value -= 128;
    for (let scale = 128; ; scale *= 128) {
      const byte = bytes[this.at++];
      if (byte < 128) return value + byte * scale;
      value += (byte - 128) * scale;
    }
  }

  /** Fill a column of numbers without a sign. */
  plain(column) {
    for (let i = 0; i < column.length; i++) column[i] = this.next();
    return column;
  }

  signed(column) {
    for (let i = 0; i < column.length; i++) {
      const value = this.next();
      column[i] = value % 2 ? -(value + 1) / 2 : value / 2;
    }
    return column;
  }

  /** Fill a column of which the differences were written. */
  running(column) {
    let sum = 0;
    for (let i = 0; i < column.length; i++) {
      const value = this.next();
      sum += value % 2 ? -(value + 1) / 2 : value / 2;
      column[i] = sum;
    }
    return column;
  }
}

// Numbers as people read them: as units.py writes them.

function three(value) {
  if (!value) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 1 || !size) return `${three(value)} s`;
  return size >= 1e-3 ? `${three(value * 1e3)} ms` : `${three(value * 1e6)} µs`;
}

function share(value) {
  const part = value * 100;
  return Math.abs(part) > 0 && Math.abs(part) < 9.95 ? `${part.toFixed(1)}%` : `${part.toFixed(0)}%`;
}
