"""The world's agent clients, each with a program that asks, calls the tool ``add`` and gives the answer.

The versions that other packages have are those of the day ``NEWEST``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

NEWEST = "2026-11-30"


def call(name: str, **arguments: object) -> str:
    """A tool call, with two spaces that no template would write."""
    return f'So.\n<tool_call>\n{{"name": "{name}",  "arguments": {json.dumps(arguments)}}}\n</tool_call>'


CALL = call("add", a=1200, b=34)
ANSWER = "It is 1234."


def fields(**values: str) -> str:
    """An answer as DSPy asks for it."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in {**values, "completed": ""}.items())


HEAD = '''
import asyncio, json, os

os.environ |= {"HOME": os.environ["TMPDIR"], "DO_NOT_TRACK": "1", "OTEL_SDK_DISABLED": "true",
               "OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "AGNO_TELEMETRY": "false",
               "HAYSTACK_TELEMETRY_ENABLED": "False", "CREWAI_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
os.chdir(os.environ["TMPDIR"])
URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
ASKED = json.load(open(os.environ["ASYNC_RL_TASK"]))["messages"][0]["content"]


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return str(a + b)


'''
TAIL = f"\nassert {ANSWER!r} in str(answer), answer\n"


@dataclass(frozen=True, slots=True)
class Client:
    """A client, with its ``requirements``, the first of which is the package itself.

    Attributes:
        program: what it runs, between ``HEAD`` and ``TAIL``.
        script: the model's answers.
        calls: the calls by kind. Why they are others than the first and continued ones is said in the table.
        tools: the calls of each tool that are read in the answers.
    """

    requirements: str
    program: str
    script: tuple[str, ...] = (CALL, ANSWER)
    calls: Mapping[str, int] = field(default_factory=lambda: {"first": 1, "continued": 1})
    tools: Mapping[str, int] = field(default_factory=lambda: {"add": 1})


CLIENTS = {
    "openai-agents": Client("openai-agents==0.24.0", """
from agents import Agent, Runner, function_tool

answer = Runner.run_sync(Agent(name="adder", tools=[function_tool(add)], model="policy"), ASKED).final_output
"""),
    "openai-agents, chats": Client("openai-agents==0.24.0", """
from agents import Agent, Runner, function_tool, set_default_openai_api

set_default_openai_api("chat_completions")
answer = Runner.run_sync(Agent(name="adder", tools=[function_tool(add)], model="policy"), ASKED).final_output
"""),
    "pydantic-ai": Client("pydantic-ai-slim[openai]==2.68.0", """
from pydantic_ai import Agent

answer = Agent("openai-chat:policy", instructions="Add.", tools=[add]).run_sync(ASKED).output
"""),
    "langgraph": Client("langgraph==1.2.22 langchain==1.5.2 langchain-openai==1.7.4", """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

graph = create_agent(ChatOpenAI(model="policy"), [add], system_prompt="Add.")
answer = graph.invoke({"messages": [("user", ASKED)]})["messages"][-1].content
"""),
    "litellm": Client("litellm==1.110.2", """
from litellm import completion

schema = {"type": "object", "properties": dict.fromkeys("ab", {"type": "integer"}), "required": ["a", "b"]}
tools = [{"type": "function", "function": {"name": "add", "description": "Adds numbers.", "parameters": schema}}]
messages = [{"role": "user", "content": ASKED}]
while (said := completion("openai/policy", messages, tools=tools).choices[0].message).tool_calls:
    (call,) = said.tool_calls
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": add(**json.loads(call.function.arguments))}]
answer = said.content
"""),
    "llama-index": Client("llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1", """
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

async def run():
    llm = OpenAILike(model="policy", api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True)
    return await FunctionAgent(tools=[add], llm=llm).run(ASKED)

answer = asyncio.run(run())
"""),
    "dspy": Client("dspy==3.4.1", """
import dspy

dspy.configure(lm=dspy.LM("openai/policy"))
answer = dspy.ReAct("question -> answer", tools=[add])(question=ASKED).answer
""", (
        fields(next_thought="Add.", next_tool_name="add", next_tool_args='{"a": 1200, "b": 34}'),
        fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
        fields(reasoning="Added.", answer=ANSWER),
    ), {"first": 2, "rewritten": 1}, {}),  # its calls have all that was done in one message
    "autogen": Client("autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5", """
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

known = dict.fromkeys(("vision", "json_output", "structured_output"), False)
client = OpenAIChatCompletionClient(model="policy", model_info={**known, "function_calling": True, "family": "unknown"})
agent = AssistantAgent("adder", client, tools=[add], max_tool_iterations=2)
answer = asyncio.run(agent.run(task=ASKED)).messages[-1].content
"""),
    "ag2": Client("ag2[openai]==1.2.1", """
from ag2 import Agent
from ag2.config import OpenAIConfig

answer = asyncio.run(Agent("adder", config=OpenAIConfig(model="policy"), tools=[add]).ask(ASKED)).body
"""),
    "crewai": Client("crewai==1.15.30", """
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

llm = LLM(model="openai/policy", base_url=URL, api_key=KEY)
agent = Agent(role="adder", goal="Add.", backstory="You add.", llm=llm, tools=[tool(add)])
task = Task(description=ASKED, expected_output="The sum.", agent=agent)
answer = Crew(agents=[agent], tasks=[task]).kickoff().raw
"""),
    "strands": Client("strands-agents[openai]==1.62.0", """
from strands import Agent, tool
from strands.models.openai import OpenAIModel

answer = Agent(OpenAIModel(client_args={"base_url": URL}, model_id="policy"), tools=[tool(add)])(ASKED)
"""),
    "adk": Client("google-adk==2.13.0 litellm==1.110.2", """
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner

agent = LlmAgent(name="adder", model=LiteLlm("openai/policy"), instruction="Add.", tools=[add])
answer = asyncio.run(InMemoryRunner(agent).run_debug(ASKED))[-1].content.parts[-1].text
"""),
    "inspect": Client("inspect-ai==0.3.285 openai==3.57.0", """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

async def execute(a: int, b: int):
    return add(a, b)

execute.__doc__ = add.__doc__
solver = [use_tools(tool(name="add")(lambda: execute)()), generate()]
(log,) = eval(Task([Sample(ASKED)], solver=solver), model="openai-api/openai/policy", display="none")
answer = log.samples[0].output.completion
"""),
    "instructor": Client("instructor==1.17.0", """
import instructor
from pydantic import BaseModel

class Sum(BaseModel):
    total: int

client = instructor.from_provider("openai/policy", mode=instructor.Mode.MD_JSON)
answer = f"It is {client.create(response_model=Sum, messages=[{'role': 'user', 'content': ASKED}]).total}."
""", ('```json\n{"total": "many"}\n```', '```json\n{"total": 1234}\n```'), tools={}),
    "smolagents": Client("smolagents[openai]==1.26.0", """
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("policy", api_base=URL, api_key=KEY, tool_choice="auto")
answer = ToolCallingAgent([tool(add)], model).run(ASKED)
""", (CALL, call("final_answer", answer=ANSWER)),
        {"first": 1, "rewritten": 1}, {"add": 1, "final_answer": 1}),  # its history has calls as text
    "smolagents, code": Client("smolagents[openai]==1.26.0", """
from smolagents import CodeAgent, OpenAIModel, tool

answer = CodeAgent([tool(add)], OpenAIModel("policy", api_base=URL, api_key=KEY)).run(ASKED)
""", tuple(f"Thought: So.\n<code>\n{code}\n</code>" for code in ("print(add(1200, 34))", f"final_answer({ANSWER!r})")),
        {"first": 1, "rewritten": 1}, {}),  # the same
    "aider": Client("aider-chat==0.86.2", """
import subprocess, sys

open("sum.txt", "w").write("1+1\\n")
flags = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable"]
options = ["--model", "openai/policy", "--edit-format", "whole", "--test-cmd", "grep -q 1234 sum.txt", "--auto-test"]
subprocess.run([sys.executable, "-m", "aider", *flags, *options, "--message", ASKED, "sum.txt"], check=True)
answer = open("sum.txt").read()
""", ("sum.txt\n```\nIt is 2.\n```", "sum.txt\n```\nIt is 1234.\n```"),
        {"first": 1, "rewritten": 1}, {}),  # each call has the files as they are, before what is asked
    "haystack": Client("haystack-ai==3.4.1", """
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function

agent = Agent(chat_generator=OpenAIChatGenerator(model="policy"), tools=[create_tool_from_function(add)])
answer = agent.run(messages=[ChatMessage.from_user(ASKED)])["last_message"].text
"""),
    "agno": Client("agno==3.1.10 openai==3.57.0", """
from agno.agent import Agent
from agno.models.openai import OpenAILike

answer = Agent(model=OpenAILike(id="policy", base_url=URL, api_key=KEY), tools=[add]).run(ASKED).content
"""),
    "anthropic": Client("anthropic==2.14.0", """
from anthropic import Anthropic, beta_tool

messages = [{"role": "user", "content": ASKED}]
runner = Anthropic().beta.messages.tool_runner(max_tokens=99, model="policy", tools=[beta_tool(add)], messages=messages)
answer = runner.until_done().content[0].text
"""),
    "semantic-kernel": Client("semantic-kernel==1.45.0", """
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

class Sums:
    add = staticmethod(kernel_function(add))

service = OpenAIChatCompletion(ai_model_id="policy", async_client=AsyncOpenAI())
answer = asyncio.run(ChatCompletionAgent(service=service, plugins=[Sums()]).get_response(ASKED))
"""),
    "agent-framework": Client("agent-framework-openai==1.17.0", """
from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient

agent = Agent(OpenAIChatClient(model="policy"), "Add.", tools=[add], default_options={"store": False})
answer = asyncio.run(agent.run(ASKED))
"""),
    "mirascope": Client("mirascope[openai]==2.8.2", """
from mirascope import llm

response = llm.Model("openai/policy:completions").call(ASKED, tools=[llm.tool(add)])
while response.tool_calls:
    response = response.resume(response.execute_tools())
answer = response.text()
"""),
}  # fmt: skip
