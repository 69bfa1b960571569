// Anthropic's client: messages, streams, tools, thinking, counted tokens, lists of models, and a refused request.
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const asked = { model, max_tokens: 20, messages: [{ role: "user", content: "How is it?" }] };
const tools = [{ name: "weather", input_schema: { type: "object", properties: { at: { type: "string" } } } }];

const whole = await client.messages.create(asked);
const stream = client.messages.stream(asked);
let streamed = "";
stream.on("text", (text) => (streamed += text));
const last = await stream.finalMessage();
const called = await client.messages.create({ ...asked, tools });
const counted = await client.messages.countTokens({ model, messages: asked.messages });
const refused = await client.messages.create({ ...asked, top_p: 7 }).catch((error) => error);
const models = [];
for await (const each of client.models.list()) models.push(each.id);
console.log(
  JSON.stringify({
    content: whole.content.map((block) => [block.type, block.text ?? block.thinking]),
    streamed,
    same: last.content.at(-1).text === streamed,
    called: called.content.filter((block) => block.type === "tool_use").map((block) => [block.name, block.input]),
    reason: called.stop_reason,
    counted: counted.input_tokens,
    refused: [refused.status, refused.message],
    models,
  }),
);
