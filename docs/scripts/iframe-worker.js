// The search box runs in a Worker, which browsers refuse to a page that was opened as a file. There it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.appendChild(frame);
      this.world = frame.contentWindow;
      this.world.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.world.document.createElement("script");
      this.loaded = new Promise((resolve) => { script.onload = resolve; });
      script.src = new URL(url, location.href).href;
      this.world.document.head.appendChild(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.world.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.world.frameElement.remove();
    }
  };
}
