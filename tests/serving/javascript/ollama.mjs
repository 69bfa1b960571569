// Ollama's client: chats, texts, streams, tools, forms, vectors, lists of models, and a refused request.
import { Ollama } from "ollama";

const [url, model] = process.argv.slice(2);
const client = new Ollama({ host: url });
const messages = [{ role: "user", content: "How is it?" }];
const parameters = { type: "object", properties: { at: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", description: "Tells it", parameters } }];

const chat = await client.chat({ model, messages });
let streamed = "";
for await (const part of await client.chat({ model, messages, stream: true })) streamed += part.message.content;
const called = await client.chat({ model, messages, tools });
const form = { type: "object", properties: { sky: { enum: ["clear", "cloudy"] } }, required: ["sky"] };
const parsed = await client.chat({ model, messages, format: form });
const text = await client.generate({ model, prompt: "How is it?" });
const refused = await client.chat({ model, messages, options: { top_p: 7 } }).catch((error) => error);
console.log(
  JSON.stringify({
    text: chat.message.content,
    streamed,
    called: called.message.tool_calls.map((each) => [each.function.name, each.function.arguments]),
    parsed: JSON.parse(parsed.message.content),
    generated: text.response,
    refused: [refused.name, refused.message],
    models: (await client.list()).models.map((each) => each.name),
    version: (await client.version()).version,
  }),
);
