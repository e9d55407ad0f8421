// Figures follow the browser's light or dark scheme, and timelines are drawn once they are there.
(() => {
  const dark = window.matchMedia('(prefers-color-scheme: dark)')

  function paint(model, [ink, soft, card, line]) {
    const colours = {
      text_color: ink, axis_label_text_color: soft, major_label_text_color: soft,
      axis_line_color: line, major_tick_line_color: line, grid_line_color: line, label_text_color: ink,
    }
    if (model.type === 'Legend') Object.assign(colours, {background_fill_color: card, border_line_color: line})
    for (const [name, colour] of Object.entries(colours)) {
      if (name in model.properties) model[name] = colour
    }
  }

  function paintAll() {
    const style = getComputedStyle(document.documentElement)
    const colours = ['--ink', '--soft', '--card', '--line'].map(name => style.getPropertyValue(name).trim())
    for (const page of Bokeh.documents) {
      for (const model of page.all_models) {
        if (['LinearAxis', 'CategoricalAxis', 'Grid', 'Legend', 'Title', 'ColorBar'].includes(model.type)) {
          paint(model, colours)
        }
      }
    }
  }

  function begin() {
    if (!window.Bokeh || !Bokeh.documents.length) return setTimeout(begin, 20)
    paintAll()
    dark.addEventListener('change', paintAll)
    for (const page of Bokeh.documents) {
      for (const model of page.all_models) {
        if (model.name === 'timeline') model.tags[0].redraw.execute(model)
      }
    }
    document.body.dataset.ready = 'yes'
  }
  begin()
})()
