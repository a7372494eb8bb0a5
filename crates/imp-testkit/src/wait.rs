//! Waiting for a condition, with a deadline and a useful last word.

use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Calls `check` until it is `Ok`, and returns what it gave. `Err` means "not yet" and says what was seen.
///
/// Looks are 10 ms apart at first and 250 ms in the end. Where something can be watched, watch it instead.
///
/// # Errors
/// When `timeout` has passed. The message names `what` was waited for and the last thing that `check` saw; a check that
/// hangs counts as not yet.
pub async fn wait_for<T, S: Display>(
    timeout: Duration,
    what: &str,
    mut check: impl AsyncFnMut() -> Result<T, S>,
) -> Result<T> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(10);
    let mut last = "nothing: the first look took too long".to_owned();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        match tokio::time::timeout(left, check()).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(seen)) => last = seen.to_string(),
            Err(_) => {}
        }
        if start.elapsed() + pause >= timeout {
            bail!("waited {:.1} s for {what}; last seen: {last}", start.elapsed().as_secs_f64());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 3 / 2).min(Duration::from_millis(250));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_thing_seen_is_told() {
        let mut looks = 0;
        let error = wait_for(Duration::from_millis(50), "the moon", async || {
            looks += 1;
            Err::<(), _>(format!("look {looks}"))
        })
        .await
        .unwrap_err()
        .to_string();
        assert!(error.contains("the moon") && error.contains(&format!("look {looks}")), "{error}");
        assert!(looks > 1);
    }

    #[tokio::test]
    async fn a_check_that_hangs_is_given_up() {
        let hang = async || std::future::pending::<Result<(), String>>().await;
        let error = wait_for(Duration::from_millis(50), "an answer", hang).await.unwrap_err();
        assert!(error.to_string().contains("took too long"), "{error}");
    }
}
