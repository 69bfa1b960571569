// The AI SDK with each of its providers: texts, streams, tools that it runs, and objects.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they go where the answer is told
const [url, name, provider] = process.argv.slice(2);
const given = { baseURL: `${url}/v1`, apiKey: "unused" };
const model = {
  anthropic: () => createAnthropic(given)(name),
  chat: () => createOpenAI(given).chat(name),
  responses: () => createOpenAI(given).responses(name),
  compatible: () => createOpenAICompatible({ name: "sglcore", supportsStructuredOutputs: true, ...given })(name),
}[provider]();
const asked = { model, prompt: "How is it?", maxRetries: 0 };

const whole = await generateText(asked);
const stream = streamText({ ...asked, onError: ({ error }) => { throw error; } });
let streamed = "";
for await (const text of stream.textStream) streamed += text;
const weather = tool({
  description: "Tells it",
  inputSchema: z.object({ at: z.string() }),
  execute: async ({ at }) => ({ at, sky: "clear" }),
});
const run = await generateText({ ...asked, tools: { weather }, stopWhen: stepCountIs(2) });
const form = Output.object({ schema: z.object({ sky: z.enum(["clear", "cloudy"]) }) });
const object = await generateText({ ...asked, output: form });
console.log(
  JSON.stringify({
    text: whole.text,
    reason: whole.finishReason,
    streamed,
    called: run.steps[0].toolCalls.map((each) => [each.toolName, each.input]),
    answered: run.text,
    object: object.output,
  }),
);
