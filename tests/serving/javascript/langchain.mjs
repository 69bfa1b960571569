// LangChain with each of its classes: texts, streams, tools and objects.
import { ChatAnthropic } from "@langchain/anthropic";
import { tool } from "@langchain/core/tools";
import { ChatOllama } from "@langchain/ollama";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const [url, name, provider] = process.argv.slice(2);
const common = { model: name, apiKey: "unused", maxRetries: 0 };
const model = {
  anthropic: () => new ChatAnthropic({ ...common, anthropicApiUrl: url, maxTokens: 20 }),
  ollama: () => new ChatOllama({ ...common, baseUrl: url }),
  openai: () => new ChatOpenAI({ ...common, configuration: { baseURL: `${url}/v1` } }),
}[provider]();
const weather = tool(async () => "clear", {
  name: "weather",
  description: "Tells it",
  schema: z.object({ at: z.string() }),
});

const whole = await model.invoke("How is it?");
let streamed = "";
for await (const part of await model.stream("How is it?")) streamed += part.text;
const called = await model.bindTools([weather]).invoke("How is it?");
const form = z.object({ sky: z.enum(["clear", "cloudy"]) });
const method = provider === "anthropic" ? "functionCalling" : "jsonSchema";
const object = await model.withStructuredOutput(form, { name: "sky", method }).invoke("How is it?");
console.log(
  JSON.stringify({
    text: whole.text,
    tokens: whole.usage_metadata.output_tokens,
    streamed,
    called: called.tool_calls.map((each) => [each.name, each.args]),
    object,
  }),
);
