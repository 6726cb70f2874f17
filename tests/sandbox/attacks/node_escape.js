// Reads, spawns, listens and kills with another interpreter.
const fs = require("fs"), child = require("child_process"), goals = JSON.parse(process.argv[2]);
const refused = (attempt, what) => { try { attempt(); console.log("BREACH", what); } catch (error) {} };
refused(() => fs.readFileSync(goals.file), "file");
refused(() => fs.writeFileSync("/usr/" + goals.marker, ""), "system");
refused(() => process.kill(goals.server, 0), "server");
refused(() => process.kill(goals.victim, "SIGKILL"), "victim");
refused(() => process.setuid(0), "root");
child.spawn("sleep", ["600"], { detached: true, stdio: "ignore" }).unref();
require("net").connect(goals.port, "127.0.0.1").on("connect", () => console.log("BREACH tcp")).on("error", () => console.log("end"));
