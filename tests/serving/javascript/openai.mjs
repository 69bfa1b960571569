// OpenAI's client: chats, completions, responses, streams, tools, forms, and a refused request.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "How is it?" }];
const parameters = { type: "object", properties: { at: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

const chat = await client.chat.completions.create({ model, messages });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true }))
  streamed += chunk.choices[0]?.delta?.content ?? "";
const called = await client.chat.completions.create({ model, messages, tools });
const form = zodResponseFormat(z.object({ sky: z.enum(["clear", "cloudy"]) }), "weather");
const parsed = await client.chat.completions.parse({ model, messages, response_format: form });
const response = await client.responses.create({ model, input: "How is it?" });
const kinds = [];
for await (const event of await client.responses.create({ model, input: "How is it?", stream: true })) kinds.push(event.type);
const refused = await client.chat.completions.create({ model, messages, top_p: 7 }).catch((error) => error);
console.log(
  JSON.stringify({
    text: chat.choices[0].message.content,
    seedIsExact: Number.isSafeInteger(chat.choices[0].seed_used),
    streamed,
    called: called.choices[0].message.tool_calls.map((each) => [each.function.name, JSON.parse(each.function.arguments)]),
    parsed: parsed.choices[0].message.parsed,
    response: response.output_text,
    ends: [kinds[0], kinds.at(-1)],
    refused: [refused.status, refused.message],
    models: (await client.models.list()).data.map((each) => each.id),
  }),
);
