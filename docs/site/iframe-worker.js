// The search of pages that are opened as files. Browsers start no worker from a file, so its script runs in a hidden
// frame. Without this the theme would load a script from another host; it looks for "iframe-worker" in the name.
if (location.protocol === "file:") {
  const deliver = (to, data) => setTimeout(() => to.onmessage?.({ data: structuredClone(data) })) // later, as a worker does
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      this.scope = this.frame.contentWindow
      this.scope.document.open() // else a frame may be loaded again, empty, and forget its script
      this.scope.document.write("<body>")
      this.scope.document.close()
      this.scope.postMessage = (data) => deliver(this, data)
      const script = this.scope.document.createElement("script")
      this.loaded = new Promise((resolve) => (script.onload = resolve))
      script.onerror = (event) => this.onerror?.(event)
      script.src = url
      this.scope.document.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => deliver(this.scope, data))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
