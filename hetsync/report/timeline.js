// Draws what is in sight of a timeline: rows one by one where there is room for them, else neighbours together, the
// parts of their time one above the other.

const ROOM = 24000 // rectangles at a time

let asked = false

function firstAfter(ends, low, high, second) {
  while (low < high) {
    const middle = (low + high) >> 1
    if (ends(middle) < second) low = middle + 1
    else high = middle
  }
  return low
}

function draw({rows, first, parts, names, colours, strip, shown, range, synchronous}) {
  const {begin, length} = rows.data
  const end = row => begin[row] + length[row]
  const ranks = first.length - 1
  const left = [], right = [], top = [], bottom = [], color = [], what = [], seconds = [], rank = []
  function add(number, from, to, high, low, part, spent) {
    left.push(from); right.push(to); top.push(number + high); bottom.push(number + low)
    color.push(colours[part]); what.push(names[part]); seconds.push(spent); rank.push(number)
  }
  const [over, under] = strip ? [0.82, 0.96] : [0.08, 0.78]
  const most = Math.max(20, Math.floor(ROOM / ranks / parts.length))
  const order = synchronous && !strip ? [1, 2, 0, 3] : parts.map((_, part) => part)
  for (let number = 0; number < ranks; number++) {
    const begins = firstAfter(end, first[number], first[number + 1], range.start)
    const ends = firstAfter(row => begin[row], begins, first[number + 1], range.end)
    const together = Math.ceil((ends - begins) / most)
    for (let row = begins; row < ends; row += together) {
      const last = Math.min(row + together, ends) - 1
      const spent = parts.map(part => {
        let sum = 0
        for (let one = row; one <= last; one++) sum += rows.data[part][one]
        return sum
      })
      const from = begin[row], to = end(last)
      const total = Math.max(to - from, spent.reduce((sum, one) => sum + one, 0))
      if (total <= 0) continue
      let at = together > 1 ? under : Math.max(from, to - total)
      for (const part of order) {
        if (spent[part] <= 0) continue
        if (together > 1) {
          const height = (under - over) * spent[part] / total
          add(number, from, to, at - height, at, part, spent[part])
          at -= height
        } else {
          add(number, at, at + spent[part], over, under, part, spent[part])
          at += spent[part]
        }
      }
    }
  }
  shown.data = {left, right, top, bottom, color, what, seconds, rank}
}

export default function (args) {
  if (asked) return
  asked = true
  requestAnimationFrame(() => {
    asked = false
    for (const each of args.layers) draw({...each, range: args.range, synchronous: args.synchronous})
  })
}
