// The WebSocket to the dashboard: the token first, then messages; it is opened again when it is lost.

const CLOSE_WRONG_TOKEN = 4401;
const RETRY_MS = [500, 1000, 2000, 4000, 8000];

export class Connection {
  constructor(onMessage, onState) {
    this.onMessage = onMessage;
    this.onState = onState;
    this.tries = 0;
    this.wanted = {};
  }

  open() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/live`);
    this.socket = socket;
    socket.onopen = () => {
      socket.send(JSON.stringify({ token: token() }));
      for (const [name, value] of Object.entries(this.wanted)) socket.send(JSON.stringify({ [name]: value }));
    };
    socket.onmessage = (event) => {
      this.tries = 0;
      this.onState("live");
      this.onMessage(JSON.parse(event.data));
    };
    socket.onclose = (event) => {
      if (this.socket !== socket) return;
      if (event.code === CLOSE_WRONG_TOKEN) {
        this.onState("wrong token");
        return;
      }
      this.onState("lost");
      const wait = RETRY_MS[Math.min(this.tries++, RETRY_MS.length - 1)];
      this.timer = setTimeout(() => this.open(), wait);
    };
  }

  reopen() {
    clearTimeout(this.timer);
    const before = this.socket;
    this.socket = null;
    before?.close();
    this.open();
  }

  /** Say what this page wants; it is said again after a reconnect. */
  want(name, value) {
    this.wanted[name] = value;
    this.send({ [name]: value });
  }

  send(message) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }
}

export function token() {
  return new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
}
