'use strict';
(async () => {
  const byId = (id) => document.getElementById(id);
  const facts = JSON.parse(byId('facts').textContent);
  const { locations, regions, patterns, steps, metrics, length, sizes } = facts;

  // The columns of slices, waits and messages, one behind the other.
  const unpacked = (base64) => {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
    const text = atob(base64); const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
    return bytes;
  };
  const packed = unpacked(byId('data').textContent);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const raw = await new Response(stream).arrayBuffer();
  let offset = 0;
  const column = (kind, count) => {
    const found = new kind(raw, offset, count);
    offset += Math.ceil(found.byteLength / 8) * 8;
    return found;
  };
  const slices = {
    gap: column(Uint32Array, sizes.slices), length: column(Uint32Array, sizes.slices),
    region: column(Uint16Array, sizes.slices), depth: column(Uint8Array, sizes.slices),
  };
  const waits = {
    location: column(Uint16Array, sizes.waits), cause: column(Int32Array, sizes.waits),
    pattern: column(Uint8Array, sizes.waits),
    begin: column(Float64Array, sizes.waits), end: column(Float64Array, sizes.waits),
  };
  const messages = {
    from: column(Uint16Array, sizes.messages), to: column(Uint16Array, sizes.messages),
    sent: column(Float64Array, sizes.messages), received: column(Float64Array, sizes.messages),
  };
  const readings = metrics.map((each) => ({
    ...each, time: column(Float64Array, each.count), value: column(Float64Array, each.count),
  }));

  // Tracks: the slices of one location at one depth, in order; the first track of a location shows its waits.
  // Where many slices share a pixel, a level with fewer is drawn: slices that are near each other are joined, and
  // `busy` says how much of a joined one they fill.
  const NEAREST = 125; // ns that the first level joins; each further one joins twice as much
  class Track {
    constructor(begin, end, region) { this.begin = begin; this.end = end; this.region = region; this.levels = [this]; }

    at(pixel) {
      const number = Math.max(0, Math.floor(Math.log2(1.5 * pixel / NEAREST)) + 1);
      while (this.levels.length <= number) this.levels.push(this.joined(this.levels.at(-1), NEAREST * 2 ** (this.levels.length - 1)));
      return this.levels[number];
    }

    joined(level, reach) {
      const count = level.begin.length;
      if (count < 512) return level;
      const begin = new Float64Array(count); const end = new Float64Array(count);
      const region = new Uint16Array(count); const busy = new Float64Array(count);
      let last = -1; let longest = 0;
      for (let i = 0; i < count; i += 1) {
        const own = level.busy ? level.busy[i] : level.end[i] - level.begin[i];
        if (last >= 0 && level.end[i] - begin[last] < reach) {
          end[last] = level.end[i]; busy[last] += own;
          if (own > longest) { longest = own; region[last] = level.region[i]; }
        } else {
          last += 1; longest = own;
          begin[last] = level.begin[i]; end[last] = level.end[i]; region[last] = level.region[i]; busy[last] = own;
        }
      }
      if (last + 1 > 0.8 * count) return level;
      return { begin: begin.slice(0, last + 1), end: end.slice(0, last + 1), region: region.slice(0, last + 1), busy: busy.slice(0, last + 1) };
    }
  }

  const firstAfter = (values, value) => { // the first index whose value is larger
    let low = 0; let high = values.length;
    while (low < high) { const middle = (low + high) >> 1; if (values[middle] > value) high = middle; else low = middle + 1; }
    return low;
  };

  const tracks = []; // by location: waits, then one track per depth
  let at = 0;
  for (const location of locations) {
    const last = at + location.slices;
    const counts = [];
    for (let i = at; i < last; i += 1) counts[slices.depth[i]] = (counts[slices.depth[i]] || 0) + 1;
    const own = Array.from(counts, (count) => new Track(
      new Float64Array(count || 0), new Float64Array(count || 0), new Uint16Array(count || 0)));
    const filled = new Uint32Array(own.length);
    let time = 0;
    for (let i = at; i < last; i += 1) {
      const depth = slices.depth[i]; const place = filled[depth]; filled[depth] += 1;
      time += slices.gap[i];
      own[depth].begin[place] = time * facts.unit;
      own[depth].end[place] = (time + slices.length[i]) * facts.unit;
      own[depth].region[place] = slices.region[i];
    }
    tracks.push(own);
    at = last;
  }
  const waiting = locations.map(() => ({ begin: [], end: [], region: [], cause: [] }));
  for (let i = 0; i < sizes.waits; i += 1) {
    const own = waiting[waits.location[i]];
    own.begin.push(waits.begin[i]); own.end.push(waits.end[i]); own.region.push(waits.pattern[i]); own.cause.push(waits.cause[i]);
  }
  const waitTracks = waiting.map((own) => Object.assign(
    new Track(Float64Array.from(own.begin), Float64Array.from(own.end), Uint16Array.from(own.region)), { cause: own.cause }));

  // Rows on the canvas.
  const ROW = 16; const AXIS = 22; const HEAD = 6;
  const rows = []; // {location, top, height}
  let height = AXIS;
  locations.forEach((location, number) => {
    const own = { location: number, top: height, height: HEAD + ROW * Math.max(1, tracks[number].length) + 6 };
    rows.push(own); height += own.height;
  });
  const canvas = byId('canvas'); const context = canvas.getContext('2d');
  const stripCanvas = byId('strip-canvas'); const stripContext = stripCanvas.getContext('2d');
  const view = { begin: 0, end: length, scroll: 0, folded: false, hits: null, chosen: null };
  const FONT = '11px system-ui, sans-serif';
  let width = 0; let gutter = 110; let shown = 400; let colours = {}; let queued = false;
  const span = () => view.end - view.begin;
  const whole = () => (view.folded ? facts.longest_step : length);
  const toX = (time) => gutter + (time - view.begin) / span() * (width - gutter);
  const toTime = (x) => view.begin + (x - gutter) / (width - gutter) * span();

  const hash = (text) => { let value = 7; for (const c of text) value = (value * 31 + c.charCodeAt(0)) >>> 0; return value; };
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    const dark = matchMedia('(prefers-color-scheme: dark)').matches;
    for (const name of ['paper', 'ink', 'soft', 'rule', 'tint', 'wait', 'mpi', 'hit', 'link']) colours[name] = style.getPropertyValue(`--${name}`).trim();
    colours.region = regions.map((each) => {
      if (each.is_mpi) return colours.mpi;
      if (each.waits) return colours.wait;
      const value = hash(each.name.replace(/[0-9]+/g, ''));
      return `hsl(${(value * 137) % 360} ${dark ? 38 : 50}% ${dark ? 40 : 72}%)`;
    });
    colours.faint = colours.region.map(() => colours.rule);
  };

  const text = (seconds) => {
    const value = Math.abs(seconds);
    if (value === 0) return '0';
    for (const [scale, unit] of [[1, 's'], [1e-3, 'ms'], [1e-6, 'µs']]) if (value >= scale) return `${Number((seconds / scale).toPrecision(4))} ${unit}`;
    return `${Number((seconds * 1e9).toPrecision(4))} ns`;
  };
  const seconds = (time) => time * 1e-9;
  const quantity = (value, unit) => {
    for (const [scale, prefix] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) if (Math.abs(value) >= scale) return `${Number((value / scale).toPrecision(4))} ${prefix}${unit}`;
    return `${Number(value.toPrecision(4))} ${unit}`;
  };

  const drawSlices = (track, begin, end, shift, top, rowHeight, colour, labels, partly = false) => {
    const level = track.at(span() / (width - gutter));
    let i = Math.max(0, firstAfter(level.begin, begin) - 1);
    const scale = (width - gutter) / span();
    let last = -1e9; let painted = '';
    for (; i < level.begin.length && level.begin[i] < end; i += 1) {
      if (level.end[i] <= begin) continue;
      const from = Math.max(begin, level.begin[i]); const to = Math.min(end, level.end[i]);
      const x = gutter + (from - shift - view.begin) * scale; const w = Math.max((to - from) * scale, 0.6);
      if (x + w < last + 0.5) continue; // within the pixel that was just painted
      last = x + w;
      const fill = colour[level.region[i]];
      if (fill !== painted) { context.fillStyle = fill; painted = fill; }
      if (partly && level.busy) { // as tall as the part of the time that the joined slices fill
        const tall = Math.max(1, rowHeight * level.busy[i] / (level.end[i] - level.begin[i]));
        context.fillRect(x, top + rowHeight - tall, w, tall);
      } else context.fillRect(x, top, w, rowHeight);
      if (labels && w > 36) {
        const name = labels[level.region[i]].name;
        const room = Math.floor((w - 6) / 6.2);
        context.fillStyle = colours.ink; painted = '';
        context.fillText(name.length > room ? `${name.slice(0, Math.max(1, room - 1))}…` : name, Math.max(x, gutter) + 3, top + rowHeight - 4);
      }
    }
  };

  const windows = (location) => { // what is shown: pieces of time, and how far each is moved
    if (!view.folded) return [[view.begin, view.end, 0]];
    const own = steps.by_location[location] || [];
    const stride = Math.max(1, Math.ceil(own.length / 60));
    return own.filter((_, number) => number % stride === 0).map(([from, to]) => [from, Math.min(to, from + view.end), from]);
  };

  const draw = () => {
    queued = false;
    const started = performance.now();
    context.fillStyle = colours.paper; context.fillRect(0, 0, width, shown);
    context.font = FONT; context.textBaseline = 'alphabetic';
    context.save(); context.beginPath(); context.rect(gutter, AXIS, width - gutter, shown - AXIS); context.clip();
    for (const row of rows) {
      const top = row.top - view.scroll;
      if (top + row.height < AXIS || top > shown) continue;
      const pieces = windows(row.location);
      const alone = pieces.length === 1;
      context.globalAlpha = alone ? 1 : Math.max(0.06, Math.min(0.5, 3 / pieces.length));
      for (const [begin, end, shift] of pieces) {
        tracks[row.location].forEach((track, depth) => drawSlices(
          track, begin, end, shift, top + HEAD + depth * ROW, ROW - 1, view.hits ? view.hits.colours : colours.region, alone ? regions : null));
        drawSlices(waitTracks[row.location], begin, end, shift, top, HEAD, view.hits ? view.hits.waits : patterns.map(() => colours.wait), null, true);
      }
      context.globalAlpha = 1;
    }
    if (byId('arrows').checked && !view.folded) drawMessages();
    if (view.chosen && !view.folded) {
      const { begin, end, location, depth } = view.chosen;
      context.strokeStyle = colours.link; context.lineWidth = 2;
      const top = rows[location].top - view.scroll + (depth < 0 ? 0 : HEAD + depth * ROW);
      context.strokeRect(toX(begin), top, Math.max(2, toX(end) - toX(begin)), depth < 0 ? HEAD : ROW - 1);
    }
    context.restore();
    drawFrame();
    drawStrip();
    frames.push(performance.now() - started);
    if (frames.length > 600) frames.shift();
  };
  const frames = []; // how long each frame took, in ms; tests read it

  const drawMessages = () => {
    const from = firstAfter(messages.sent, view.begin - facts.longest_message);
    const to = firstAfter(messages.sent, view.end);
    if (to - from > 400) return; // too many to tell apart
    context.strokeStyle = colours.ink; context.fillStyle = colours.ink; context.lineWidth = 1; context.globalAlpha = 0.7;
    context.beginPath();
    for (let i = from; i < to; i += 1) {
      if (messages.received[i] < view.begin) continue;
      const one = rows[messages.from[i]]; const other = rows[messages.to[i]];
      const x = toX(messages.received[i]); const y = other.top - view.scroll + HEAD + ROW / 2;
      context.moveTo(toX(messages.sent[i]), one.top - view.scroll + HEAD + ROW / 2); context.lineTo(x, y);
      context.moveTo(x - 5, y - 3); context.lineTo(x, y); context.lineTo(x - 5, y + 3);
    }
    context.stroke(); context.globalAlpha = 1;
  };

  const drawFrame = () => {
    context.fillStyle = colours.paper; context.fillRect(0, 0, width, AXIS); context.fillRect(0, 0, gutter, shown);
    context.fillStyle = colours.soft; context.strokeStyle = colours.rule; context.lineWidth = 1;
    const step = 10 ** Math.floor(Math.log10(span() / Math.max(2, (width - gutter) / 110)));
    const nice = [1, 2, 5, 10].find((each) => span() / (each * step) <= Math.max(2, (width - gutter) / 90)) * step;
    for (let time = Math.ceil(view.begin / nice) * nice; time <= view.end; time += nice) {
      const x = toX(time);
      context.beginPath(); context.moveTo(x, AXIS - 5); context.lineTo(x, AXIS); context.stroke();
      context.textAlign = 'center'; context.fillText(text(seconds(time)), Math.min(Math.max(x, gutter + 20), width - 24), 13);
    }
    context.textAlign = 'left';
    for (const row of rows) {
      const top = row.top - view.scroll;
      if (top + row.height < AXIS || top > shown) continue;
      context.save(); context.beginPath(); context.rect(0, Math.max(AXIS, top), gutter - 4, row.height); context.clip();
      context.fillStyle = colours.ink; context.fillText(locations[row.location].process, 6, top + HEAD + 11);
      context.fillStyle = colours.soft;
      if (row.height > 2 * ROW + HEAD) context.fillText(locations[row.location].name || locations[row.location].host, 6, top + HEAD + 11 + ROW);
      context.restore();
      context.strokeStyle = colours.rule; context.beginPath(); context.moveTo(0, top - 3); context.lineTo(width, top - 3); context.stroke();
    }
    if (height > shown) { // where the rows on the canvas lie among all
      const part = shown / height;
      context.fillStyle = colours.soft; context.globalAlpha = 0.5;
      context.fillRect(width - 5, AXIS + (view.scroll / height) * (shown - AXIS), 4, part * (shown - AXIS));
      context.globalAlpha = 1;
    }
  };

  const drawStrip = () => {
    const tall = 48; const name = byId('strip').value;
    stripContext.fillStyle = colours.paper; stripContext.fillRect(0, 0, width, tall);
    stripContext.font = FONT; stripContext.fillStyle = colours.soft;
    const own = readings.filter((each) => each.name === name);
    if (view.folded) return;
    if (name === '') {
      const bins = Math.max(1, Math.floor((width - gutter) / 3)); const sums = new Float64Array(bins);
      const bin = span() / bins;
      for (const track of waitTracks) {
        const level = track.at(bin);
        for (let i = Math.max(0, firstAfter(level.begin, view.begin) - 1); i < level.begin.length && level.begin[i] < view.end; i += 1) {
          const from = Math.max(0, (level.begin[i] - view.begin) / bin); const to = Math.min(bins, (level.end[i] - view.begin) / bin);
          const part = level.busy ? level.busy[i] / (level.end[i] - level.begin[i]) : 1;
          for (let b = Math.floor(from); b < to; b += 1) sums[b] += part * Math.max(0, Math.min(to, b + 1) - Math.max(from, b));
        }
      }
      stripContext.fillText('ranks waiting', 6, 14); stripContext.fillText(`of ${facts.ranks}`, 6, 28);
      stripContext.fillStyle = colours.wait;
      for (let b = 0; b < bins; b += 1) { const tallness = Math.min(1, sums[b] / facts.ranks) * (tall - 4); stripContext.fillRect(gutter + b * 3, tall - tallness, 2.4, tallness); }
      return;
    }
    let most = -Infinity; let least = Infinity;
    for (const each of own) for (const value of each.value) { most = Math.max(most, value); least = Math.min(least, value); }
    stripContext.fillText(quantity(most, own[0].unit), 6, 12); stripContext.fillText(quantity(least, own[0].unit), 6, tall - 4);
    for (const each of own) {
      stripContext.strokeStyle = `hsl(${(each.location * 137) % 360} 60% 50%)`;
      stripContext.beginPath();
      const from = Math.max(0, firstAfter(each.time, view.begin) - 1);
      for (let i = from; i < each.count; i += 1) {
        const x = Math.max(gutter, toX(each.time[i])); const y = tall - 3 - (most > least ? (each.value[i] - least) / (most - least) : 0.5) * (tall - 8);
        if (i === from) stripContext.moveTo(x, y); else stripContext.lineTo(x, y);
        if (each.time[i] > view.end) break;
      }
      stripContext.stroke();
    }
  };

  const queue = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
  const resize = () => {
    const ratio = devicePixelRatio || 1;
    width = byId('frame').clientWidth;
    context.font = FONT;
    const widest = Math.max(...locations.slice(0, 1000).map((each) => context.measureText(each.process).width));
    gutter = Math.min(Math.max(width < 560 ? 72 : 110, Math.ceil(widest) + 12), Math.floor(0.3 * width));
    shown = Math.min(height + 2, Math.max(220, Math.round(innerHeight * 0.62)));
    for (const [one, two, tall] of [[canvas, context, shown], [stripCanvas, stripContext, 48]]) {
      one.width = Math.round(width * ratio); one.height = Math.round(tall * ratio); one.style.height = `${tall}px`;
      two.setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    queue();
  };
  const clamp = () => {
    const size = Math.min(whole(), Math.max(span(), 20));
    view.begin = Math.max(0, Math.min(view.begin, whole() - size)); view.end = view.begin + size;
    view.scroll = Math.max(0, Math.min(view.scroll, height - shown));
    queue();
  };
  const zoom = (factor, middle) => { view.begin = middle - (middle - view.begin) * factor; view.end = middle + (view.end - middle) * factor; clamp(); };
  const move = (part, rowsDown = 0) => { const by = part * span(); view.begin += by; view.end += by; view.scroll += rowsDown; clamp(); };
  const show = (begin, end) => { const margin = Math.max(10, (end - begin) * 0.02); view.begin = begin - margin; view.end = end + margin; clamp(); };

  // What is under a place.
  const find = (x, y) => {
    if (x < gutter || y < AXIS || view.folded) return null;
    const row = rows.find((each) => y + view.scroll >= each.top && y + view.scroll < each.top + each.height);
    if (!row) return null;
    const inside = y + view.scroll - row.top;
    const depth = inside < HEAD ? -1 : Math.floor((inside - HEAD) / ROW);
    const track = depth < 0 ? waitTracks[row.location] : tracks[row.location][depth];
    if (!track) return null;
    const slack = span() / (width - gutter); const time = toTime(x);
    const i = firstAfter(track.begin, time + slack) - 1;
    if (i < 0 || track.end[i] < time - slack) return null;
    return { location: row.location, depth, index: i, begin: track.begin[i], end: track.end[i], region: track.region[i], cause: depth < 0 ? track.cause[i] : -1 };
  };
  const describe = (each) => {
    const who = locations[each.location].process + (locations[each.location].host ? ` on ${locations[each.location].host}` : '');
    const name = each.depth < 0 ? patterns[each.region] : regions[each.region].name;
    const where = each.depth < 0 || !regions[each.region].file || regions[each.region].is_mpi ? '' : ` (${regions[each.region].file}${regions[each.region].line ? `:${regions[each.region].line}` : ''})`;
    const cause = each.cause >= 0 ? `, for ${locations[each.cause].process}` : '';
    return `${name}${where}: ${text(seconds(each.end - each.begin))} from ${text(seconds(each.begin))}, ${who}${cause}`;
  };
  const choose = (each) => { view.chosen = each; if (each) byId('detail').textContent = describe(each); queue(); };

  // Pointers: one drags, two zoom.
  const pointers = new Map(); let dragged = false;
  canvas.addEventListener('pointerdown', (event) => { canvas.setPointerCapture(event.pointerId); pointers.set(event.pointerId, event); dragged = false; });
  canvas.addEventListener('pointermove', (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) { const each = find(event.offsetX, event.offsetY); if (each) byId('detail').textContent = describe(each); return; }
    if (Math.abs(event.offsetX - before.offsetX) + Math.abs(event.offsetY - before.offsetY) < 3 && !dragged) return;
    dragged = true;
    if (pointers.size === 2) {
      const other = [...pointers.values()].find((each) => each.pointerId !== event.pointerId);
      const old = Math.max(20, Math.abs(before.offsetX - other.offsetX)); const now = Math.max(20, Math.abs(event.offsetX - other.offsetX));
      zoom(old / now, toTime((event.offsetX + other.offsetX) / 2));
    } else move(-(event.offsetX - before.offsetX) / (width - gutter), before.offsetY - event.offsetY);
    pointers.set(event.pointerId, event);
  });
  const release = (event) => { if (pointers.delete(event.pointerId) && !dragged && event.type === 'pointerup') choose(find(event.offsetX, event.offsetY)); };
  canvas.addEventListener('pointerup', release); canvas.addEventListener('pointercancel', release);
  canvas.addEventListener('dblclick', (event) => { const each = find(event.offsetX, event.offsetY); if (each) show(each.begin, each.end); });
  canvas.addEventListener('wheel', (event) => {
    event.preventDefault();
    if (event.shiftKey) move(0, event.deltaY);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / (width - gutter));
    else zoom(1.0015 ** Math.max(-400, Math.min(400, event.deltaY)), toTime(Math.max(gutter, event.offsetX)));
  }, { passive: false });

  const beside = (direction) => { // the next slice of the chosen one's track
    const { location, depth, index } = view.chosen;
    const track = depth < 0 ? waitTracks[location] : tracks[location][depth]; const next = index + direction;
    if (next < 0 || next >= track.begin.length) return;
    const each = { ...view.chosen, index: next, begin: track.begin[next], end: track.end[next], region: track.region[next], cause: depth < 0 ? track.cause[next] : -1 };
    if (each.begin > view.end || each.end < view.begin) { const by = (each.begin + each.end) / 2 - (view.begin + view.end) / 2; view.begin += by; view.end += by; clamp(); }
    choose(each);
  };
  canvas.addEventListener('keydown', (event) => {
    const middle = (view.begin + view.end) / 2;
    const keys = {
      ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), ArrowUp: () => move(0, -3 * ROW), ArrowDown: () => move(0, 3 * ROW),
      PageUp: () => move(0, -shown / 2), PageDown: () => move(0, shown / 2), Home: () => move(-1e9), End: () => move(1e9),
      '+': () => zoom(0.6, middle), '=': () => zoom(0.6, middle), '-': () => zoom(1 / 0.6, middle), 0: () => show(0, whole()),
      w: () => zoom(0.6, middle), s: () => zoom(1 / 0.6, middle), a: () => move(-0.2), d: () => move(0.2),
      Enter: () => choose(find(gutter + (width - gutter) / 2, rows[0].top - view.scroll + HEAD + 4)),
      '.': () => view.chosen && beside(1), ',': () => view.chosen && beside(-1),
      Escape: () => choose(null),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault(); keys[event.key]();
  });

  // Search.
  const search = () => {
    const words = byId('find').value.trim().toLowerCase();
    byId('hits').textContent = ''; view.hits = null;
    if (words) {
      const chosen = regions.map((each) => each.name.toLowerCase().includes(words));
      const chosenWaits = patterns.map((each) => each.toLowerCase().includes(words));
      const found = [];
      const collect = (track, location, depth, wanted) => { for (let i = 0; i < track.begin.length; i += 1) if (wanted[track.region[i]]) found.push([track.begin[i], location, depth, i]); };
      tracks.forEach((own, location) => own.forEach((track, depth) => collect(track, location, depth, chosen)));
      waitTracks.forEach((track, location) => collect(track, location, -1, chosenWaits));
      found.sort((one, other) => one[0] - other[0]);
      view.hits = {
        found, place: -1, colours: chosen.map((each) => (each ? colours.hit : colours.rule)),
        waits: chosenWaits.map((each) => (each ? colours.hit : colours.rule)),
      };
      byId('hits').textContent = `${found.length.toLocaleString('en')} hits`;
    }
    queue();
  };
  const visit = (direction) => {
    if (!view.hits || !view.hits.found.length) return;
    const { found } = view.hits;
    view.hits.place = (view.hits.place + direction + found.length) % found.length;
    const [, location, depth, index] = found[view.hits.place];
    const track = depth < 0 ? waitTracks[location] : tracks[location][depth];
    const each = { location, depth, index, begin: track.begin[index], end: track.end[index], region: track.region[index], cause: depth < 0 ? track.cause[index] : -1 };
    const half = Math.min(span() / 2, Math.max((each.end - each.begin) * 8, 50));
    view.begin = (each.begin + each.end) / 2 - half; view.end = view.begin + 2 * half;
    view.scroll = rows[location].top - AXIS - 20; view.folded = byId('fold').checked = false;
    clamp(); choose(each);
    byId('hits').textContent = `${(view.hits.place + 1).toLocaleString('en')} of ${found.length.toLocaleString('en')}`;
  };
  byId('find').addEventListener('input', search);
  byId('find').addEventListener('keydown', (event) => { if (event.key === 'Enter') { event.preventDefault(); visit(event.shiftKey ? -1 : 1); } });
  byId('next').addEventListener('click', () => visit(1)); byId('previous').addEventListener('click', () => visit(-1));
  byId('in').addEventListener('click', () => zoom(0.6, (view.begin + view.end) / 2));
  byId('out').addEventListener('click', () => zoom(1 / 0.6, (view.begin + view.end) / 2));
  byId('all').addEventListener('click', () => show(0, whole()));
  byId('arrows').addEventListener('change', queue);
  byId('strip').addEventListener('change', queue);
  document.addEventListener('keydown', (event) => { if (event.key === '/' && event.target === document.body) { event.preventDefault(); byId('find').focus(); } });

  // Steps and metrics to choose from.
  for (let i = 0; i < steps.spans.length; i += 1) byId('step').add(new Option(`${i + 1}: ${text(seconds(steps.spans[i][1] - steps.spans[i][0]))}`, i));
  byId('step').disabled = byId('fold').disabled = !steps.spans.length;
  byId('step').addEventListener('change', (event) => {
    if (event.target.value === '') return;
    view.folded = byId('fold').checked = false; show(...steps.spans[event.target.value]);
  });
  byId('fold').addEventListener('change', (event) => { view.folded = event.target.checked; view.chosen = null; view.begin = 0; view.end = whole(); clamp(); });
  byId('strip').add(new Option('ranks waiting', ''));
  for (const name of new Set(readings.map((each) => each.name))) byId('strip').add(new Option(name, name));

  readColours();
  const restyle = () => { readColours(); if (view.hits) search(); queue(); };
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', restyle);
  addEventListener('resize', resize);
  addEventListener('beforeprint', () => { readColours(); draw(); });
  resize(); draw();
  for (const own of [...tracks.flat(), ...waitTracks]) own.at(length / 300); // what zooming out will need
  window.timeline = { view, frames, show, find, rows, zoom, move, clamp, draw };
  document.documentElement.dataset.ready = 'yes';
})();
