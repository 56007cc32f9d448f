"""What a prompt's middle asks for does not choose the program of the rows beside it."""

from engine import SamplingParams
from engine.step import StepPlan
from tests.engine.mixed_steps import Arrival, run
from tests.engine.test_decode_programs import build
from tests.toy import make_drafter, make_target


def test_the_middle_of_a_prompt_that_draws_leaves_greedy_rows_greedy(tmp_path) -> None:
    target = make_target(tmp_path / "target", kind="qwen3")
    drafter = make_drafter(tmp_path / "drafter", target)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=4, logprobs=1, ignore_eos=True)
    requests = [
        Arrival(step=0, prompt=[5, 6, 7], params=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)),
        Arrival(step=3, prompt=list(range(60)), params=drawn),
    ]
    seen: list[tuple[StepPlan, int]] = []
    with build((target, drafter), "repeated", max_num_batched_tokens=26) as llm:
        programs = llm._rank.runner._decode_programs
        traits_of = programs._traits_of

        def note(plan: StepPlan) -> int:
            seen.append((plan, traits_of(plan)))
            return seen[-1][1]

        programs._traits_of = note
        result = run(llm, requests, schedules={0: {5: 2}})
    of_middles = {traits for plan, traits in seen if plan.prefill and not any(c.samples for c in plan.prefill)}
    of_ends = {traits for plan, traits in seen if any(c.samples for c in plan.prefill) and plan.decode_slots}
    assert of_middles == {0} and of_ends and 0 not in of_ends
    assert result.mixed and all(
        not c.samples for plan in result.mixed for c in plan.prefill
    )  # its end has log-probabilities
    assert [len(tokens) for tokens in result.tokens] == [40, 4]
